"""Prefill attention against its torch twins: many sequences, cached prefixes, scattered pages."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import attention_prefill as prefill
from crossdock.kernels.attention_gather import TAIL, gather_keys, gather_keys_twin
from crossdock.kernels.attention_split import split_queries
from crossdock.kernels.rounding import E4M3_MAX

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def starts(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device=device)


def error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row; inf where there is a NaN."""
    rows = (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-9)
    return float(rows.nan_to_num(float("inf")).max())


def paged(lens: list[int], page: int, device: torch.device) -> tuple[Tensor, int]:
    pages = [-(-n // page) for n in lens]
    free = torch.randperm(sum(pages) + 2).tolist()
    table = torch.zeros(len(lens), max(pages) + 1, dtype=torch.int64)
    for b, n in enumerate(pages):
        table[b, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int64)
    return table.to(device), (sum(pages) + 2) * page


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "window", "dtype"),
    [
        (8, 2, 16, 16, None, torch.float32),
        (6, 2, 24, 5, 70, torch.float32),
        (4, 4, 32, 16, None, torch.bfloat16),
    ],
)
def test_gqa_matches_the_twin(device, heads, kv_heads, dim, page, window, dtype):
    queries, lens = [1, 70, 33, 150], [200, 70, 161, 155]
    table, slots = paged(lens, page, device)
    q = torch.randn(sum(queries), heads, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, slots, kv_heads, dim, device=device, dtype=dtype)
    cu, lens_B = starts(queries, device), torch.tensor(lens, dtype=torch.int32, device=device)
    split = split_queries(cu, len(q), prefill.tile_tokens(heads // kv_heads))
    got = prefill.prefill_gqa(q, k, v, table, cu, lens_B, split, 0.25, page, window)
    want = prefill.prefill_gqa_twin(q, k, v, table, cu, lens_B, 0.25, page, window)
    assert got.dtype == dtype and error(got, want) < TOLERANCE[dtype]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1) / E4M3_MAX
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


@pytest.fixture
def no_zeros_by_luck():
    """Memory that nobody wrote to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [slice(0, 3), slice(1, 3)])
@pytest.mark.parametrize(("keys", "room"), [(130, 130), (130, 500), (0, 40)])
def test_keys_of_an_fp8_cache_are_gathered(device, no_zeros_by_luck, keys, room, heads, dtype):
    (k, k_scale), (v, v_scale) = (quantised(torch.randn(300, 3, 24, device=device)) for _ in "kv")
    k, v, *scales = (x[:, heads] for x in (k, v, k_scale, v_scale))
    slots_N = torch.randint(300, (room,), device=device)
    cu_k = torch.tensor([0, keys // 3, keys // 3, keys], dtype=torch.int32, device=device)
    given = (k, v, tuple(scales), slots_N, cu_k, dtype)
    for got, want in zip(gather_keys(*given), gather_keys_twin(*given), strict=True):
        assert got.shape == (room, k.shape[1], 24) and got.dtype == dtype
        assert torch.equal(got[: keys + TAIL], want[: keys + TAIL])


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (50, torch.bfloat16)])
def test_gqa_reads_gathered_keys(device, window, dtype):
    """As it reads pages, the prompts with prefixes and an empty one among them."""
    queries, lens = [3, 0, 40, 90], [90, 0, 40, 170]
    table, slots = paged(lens, 16, device)
    q = torch.randn(sum(queries), 4, 32, device=device, dtype=dtype)
    k, v = torch.randn(2, slots, 2, 32, device=device, dtype=dtype)
    cu_q, cu_k = starts(queries, device), starts(lens, device)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=device)
    split = split_queries(cu_q, len(q), prefill.tile_tokens(2))
    slots_N = torch.cat([table[b, i // 16, None] * 16 + i % 16
                         for b, n in enumerate(lens) for i in range(n)])  # fmt: skip
    rows = (k[slots_N], v[slots_N])
    got = prefill.prefill_gathered(q, *rows, cu_q, cu_k, lens_B, split, 0.2, window)
    want = prefill.prefill_gqa_twin(q, k, v, table, cu_q, lens_B, 0.2, 16, window)
    assert error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mla_matches_the_twin(device, dtype):
    queries, lens = [1, 130, 33], [100, 130, 161]
    T, N, h = sum(queries), sum(lens), 3
    q = torch.randn(T, h, 24 + 8, device=device, dtype=dtype)
    kv = torch.randn(N, h, 24 + 16, device=device, dtype=dtype)
    key = torch.randn(N, 40 + 8, device=device, dtype=dtype)[:, 40:]
    cu_q, cu_k = starts(queries, device), starts(lens, device)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=device)
    split = split_queries(cu_q, T, prefill.tile_tokens(1))
    got = prefill.prefill_mla(
        q[..., :24], q[..., 24:], kv[..., :24], kv[..., 24:], key, cu_q, cu_k, lens_B, split, 0.2
    )
    k = torch.cat((kv[..., :24], key[:, None].expand(-1, h, -1)), -1)
    want = torch.cat(
        [
            prefill.causal_twin(q[a:b], k[c:d], kv[c:d, :, 24:], 0.2)
            for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        ]
    )
    assert got.shape == (T, h, 16) and error(got, want) < TOLERANCE[dtype]


def test_the_twin_sees_what_came_before_and_nothing_else():
    q, k, v = torch.randn(3, 5, 2, 8)
    out = prefill.causal_twin(q[3:], k, v, 0.5)
    again = prefill.causal_twin(q, k, v, 0.5)
    torch.testing.assert_close(out, again[3:])
    torch.testing.assert_close(again[0], v[0])  # the first token sees itself alone
    near = prefill.causal_twin(q, k, v, 0.5, window=1)
    torch.testing.assert_close(near, v)
