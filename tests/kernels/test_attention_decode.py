"""Decode attention against its torch twins, on fresh data and scattered pages."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import attention_gqa as gqa
from crossdock.kernels import attention_mla as mla
from crossdock.kernels.attention_split import split_keys, split_queries, split_twin
from crossdock.kernels.rounding import E4M3_MAX

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def paging(lens: list[int], page: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """(table, lens, slots): pages in random order, some unused; padding points to page 0."""
    pages = [-(-n // page) for n in lens]
    free = (torch.randperm(sum(pages) + 3) + 0).tolist()
    table = torch.zeros(len(lens), max([*pages, 1]) + 1, dtype=torch.int64)
    for b, n in enumerate(pages):
        table[b, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int64)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=device)
    return table.to(device), lens_B, (sum(pages) + 3) * page


def error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a sequence; inf where there is a NaN."""
    rows = (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-9)
    return float(rows.nan_to_num(float("inf")).max())


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 and a scale per row of the last dimension."""
    scale = x.abs().amax(-1).clamp_min(1e-6) / E4M3_MAX
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("lens", [[0, 300, 1000, 1], [5], [0, 0], [129] * 40])
@pytest.mark.parametrize("window", [None, 200])
def test_items_cover_every_key_once(device: torch.device, lens: list[int], window: int | None):
    split = split_keys(torch.tensor(lens, dtype=torch.int32, device=device), 6, window)
    chunk = int(split.chunk)
    first, seq = split_twin([min(n, window or n) for n in lens], chunk)
    assert chunk % 128 == 0
    assert split.first_B1.tolist() == first
    assert split.seq_W[: len(seq)].tolist() == seq
    assert len(seq) <= split.items


@pytest.mark.parametrize(("lens", "chunk"), [([4096] * 8, 4096), ([4096] * 2, 1024), ([9], 128)])
def test_items_come_out_even_where_they_can(device: torch.device, lens: list[int], chunk: int):
    split = split_keys(torch.tensor(lens, dtype=torch.int32, device=device), 8)
    assert int(split.chunk) == chunk  # 8 items at once: one round each


def test_queries_are_cut_at_the_tile(device: torch.device):
    lens = [3, 0, 64, 17]
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device=device)
    split = split_queries(cu, 84, 16)
    first, seq = split_twin(lens, 16)
    assert split.first_B1.tolist() == first and split.seq_W[: len(seq)].tolist() == seq
    assert int(split.chunk) == 16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "window", "dtype"),
    [
        (8, 2, 16, 16, None, torch.float32),
        (6, 2, 24, 5, 130, torch.float32),
        (4, 4, 32, 1, None, torch.bfloat16),
    ],
)
def test_gqa_matches_the_twin(device, heads, kv_heads, dim, page, window, dtype):
    table, lens, slots = paging([1, 0, 200, 389], page, device)
    q = torch.randn(4, heads, dim + 3, device=device, dtype=dtype)[..., :dim]
    k, v = torch.randn(2, slots, kv_heads, dim, device=device, dtype=dtype)
    split = split_keys(lens, 3, window)
    got = gqa.decode_gqa(q, k, v, table, lens, split, 0.3, page, window)
    want = gqa.decode_gqa_twin(q, k, v, table, lens, 0.3, page, window)
    assert got.dtype == dtype and (got[1] == 0).all()
    assert error(got, want) < TOLERANCE[dtype]


def test_gqa_reads_a_scaled_cache(device):
    table, lens, slots = paging([7, 300], 16, device)
    q = torch.randn(2, 4, 32, device=device)
    k, v = torch.randn(2, slots, 2, 32, device=device) * torch.rand(slots, 2, 1, device=device)
    (k8, ks), (v8, vs) = quantised(k), quantised(v)
    split = split_keys(lens, 4)
    got = gqa.decode_gqa(q, k8, v8, table, lens, split, 0.3, 16, scales=(ks, vs))
    want = gqa.decode_gqa_twin(q, k8, v8, table, lens, 0.3, 16, scales=(ks, vs))
    assert error(got, want) < 2e-6
    exact = gqa.decode_gqa_twin(q, k, v, table, lens, 0.3, 16)
    assert error(got, exact) < 0.2  # 0.04; in one of 500 runs 0.1
    one = torch.tensor(0.25, device=device).expand(slots, 2)  # a single scale for the tensor
    k8, v8 = (k / 0.25).to(k8.dtype), (v / 0.25).to(k8.dtype)
    got = gqa.decode_gqa(q, k8, v8, table, lens, split, 0.3, 16, scales=(one, one))
    want = gqa.decode_gqa_twin(q, k8.float() / 4, v8.float() / 4, table, lens, 0.3, 16)
    assert error(got, want) < 2e-6


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "page", "dtype"),
    [
        (4, 64, 16, 16, torch.float32),
        (20, 40, 8, 3, torch.float32),
        (70, 64, 16, 16, torch.float32),
        (16, 32, 16, 64, torch.bfloat16),
    ],
)
def test_mla_matches_the_twin(device, heads, latent, rope, page, dtype):
    table, lens, slots = paging([1, 0, 200, 389], page, device)
    q = torch.randn(heads, 4, latent, device=device, dtype=dtype).transpose(0, 1)
    q_rope = torch.randn(4, heads, rope, device=device, dtype=dtype)
    cache = torch.randn(slots, latent + rope, device=device, dtype=dtype)
    got = mla.decode_mla(q, q_rope, cache, table, lens, split_keys(lens, 3), 0.2, page)
    want = mla.decode_mla_twin(q, q_rope, cache, table, lens, 0.2, page)
    assert got.shape == q.shape and (got[1] == 0).all()
    assert error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [16, 64])
def test_mla_reads_a_scaled_cache(device, heads):
    table, lens, slots = paging([9, 290], 16, device)
    q, q_rope = torch.randn(2, heads, 64, device=device), torch.randn(2, heads, 16, device=device)
    latent, key = torch.randn(slots, 64, device=device), torch.randn(slots, 16, device=device) * 9
    (latent8, s0), (key8, s1) = quantised(latent), quantised(key)
    cache, scales = torch.cat((latent8, key8), 1), torch.stack((s0, s1), 1)
    split = split_keys(lens, 3)
    got = mla.decode_mla(q, q_rope, cache, table, lens, split, 0.1, 16, scales)
    want = mla.decode_mla_twin(q, q_rope, cache, table, lens, 0.1, 16, scales)
    assert error(got, want) < 2e-6


def with_a_sink(slots, table, width, device):
    """Keys of equal scores but the first, 10 nats above them, as of an attention sink."""
    keys = torch.zeros(slots, width, device=device)
    keys[:, 0] = 1.0
    keys[int(table[0, 0]) * 16, 0] = 11.0
    return keys


def test_gqa_keeps_small_weights_of_small_values_over_a_scaled_cache(device):
    table, lens, slots = paging([4096], 16, device)
    q = torch.zeros(1, 4, 32, device=device, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    k = with_a_sink(slots, table, 32, device)[:, None]
    v = 0.1 * (1 + torch.rand(slots, 1, 32, device=device))
    v[int(table[0, 0]) * 16] *= 0.01
    (k8, ks), (v8, vs) = quantised(k), quantised(v)
    for parts in (1, 4):
        split = split_keys(lens, parts)
        got = gqa.decode_gqa(q, k8, v8, table, lens, split, 1.0, 16, scales=(ks, vs))
        want = gqa.decode_gqa_twin(q, k8, v8, table, lens, 1.0, 16, scales=(ks, vs))
        assert error(got, want) < 4e-3


@pytest.mark.parametrize("heads", [16, 64])
def test_mla_keeps_small_weights_of_small_latents_over_a_scaled_cache(device, heads):
    table, lens, slots = paging([2048], 16, device)
    q = torch.zeros(1, heads, 32, device=device, dtype=torch.bfloat16)
    q_rope = torch.zeros(1, heads, 16, device=device, dtype=torch.bfloat16)
    q_rope[..., 0] = 1.0
    latent = 0.1 * (1 + torch.rand(slots, 32, device=device))
    latent[int(table[0, 0]) * 16] *= 0.01
    (latent8, s0), (key8, s1) = quantised(latent), quantised(with_a_sink(slots, table, 16, device))
    cache, scales = torch.cat((latent8, key8), 1), torch.stack((s0, s1), 1)
    split = split_keys(lens, 1)
    got = mla.decode_mla(q, q_rope, cache, table, lens, split, 1.0, 16, scales)
    want = mla.decode_mla_twin(q, q_rope, cache, table, lens, 1.0, 16, scales)
    assert error(got, want) < 4e-3


def test_slots_that_nobody_has_written_give_zeros(device):
    table, lens, slots = paging([70], 16, device)
    fp8, at = torch.float8_e4m3fn, {"device": device}
    q, split = torch.randn(1, 16, 32, dtype=torch.bfloat16, **at), split_keys(lens, 2)
    kv, none = torch.zeros(slots, 1, 32, **at).to(fp8), torch.zeros(slots, 1, **at)
    assert (gqa.decode_gqa(q, kv, kv, table, lens, split, 1.0, 16, scales=(none, none)) == 0).all()
    cache, none = torch.zeros(slots, 48, **at).to(fp8), torch.zeros(slots, 2, **at)
    out = mla.decode_mla(q, q[..., :16], cache, table, lens, split, 1.0, 16, none)
    assert (out == 0).all()
