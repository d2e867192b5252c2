"""Attention compiled, at real widths: every sequence against fp32, and replayed from a graph."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from crossdock.kernels import attention_gqa as gqa
from crossdock.kernels import attention_mla as mla
from crossdock.kernels import attention_prefill as prefill
from crossdock.kernels.attention_gather import gather_keys
from crossdock.kernels.attention_split import split_keys, split_queries
from crossdock.kernels.rope import gqa_norm_rope_write, mla_norm_rope_write
from crossdock.kernels.rounding import E4M3_MAX

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LENS = [1, 4095, 0, 777, 2048, 130]


@pytest.fixture(autouse=True)
def full_precision():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    memory = torch.full((1 << 27,), float("nan"), device=CUDA)  # what outputs will come from
    del memory
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def paging(lens: list[int], page: int) -> tuple[Tensor, Tensor, int]:
    pages = [-(-n // page) for n in lens]
    perm = torch.randperm(sum(pages), device=CUDA)
    table = torch.zeros(len(lens), max(pages), dtype=torch.int64, device=CUDA)
    for row, part in zip(table, perm.split(pages), strict=True):
        row[: len(part)] = part
    return table, torch.tensor(lens, dtype=torch.int32, device=CUDA), sum(pages) * page


def error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row; inf where there is a NaN."""
    rows = (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-9)
    return float(rows.nan_to_num(float("inf")).max())


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1).clamp_min(1e-6) / E4M3_MAX
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(32, 4, None), (64, 4, 1000), (14, 2, None)]
)
def test_gqa_decode(heads, kv_heads, window, page, fp8):
    table, lens, slots = paging(LENS, page)
    q, scales = randn(len(LENS), heads, 128), None
    k, v = randn(slots, kv_heads, 128), randn(slots, kv_heads, 128)
    if fp8:
        (k, k_scale), (v, v_scale) = quantised(k), quantised(v)
        scales = (k_scale, v_scale)
    split = split_keys(lens, 64, window)
    got = gqa.decode_gqa(q, k, v, table, lens, split, 0.088, page, window, scales)
    want = gqa.decode_gqa_twin(q, k, v, table, lens, 0.088, page, window, scales)
    assert error(got, want) < 6e-3


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "page"), [(16, 16), (20, 16), (32, 64), (64, 5), (64, 16), (128, 16)]
)
def test_mla_decode(heads, page, fp8):
    table, lens, slots = paging(LENS, page)
    q, q_rope = randn(heads, len(LENS), 512).transpose(0, 1), randn(len(LENS), heads, 64)
    cache, scales = randn(slots, 576), None
    if fp8:
        (latent, s0), (key, s1) = quantised(cache[:, :512]), quantised(cache[:, 512:])
        cache, scales = torch.cat((latent, key), 1), torch.stack((s0, s1), 1)
    got = mla.decode_mla(q, q_rope, cache, table, lens, split_keys(lens, 64), 0.04, page, scales)
    want = mla.decode_mla_twin(q, q_rope, cache, table, lens, 0.04, page, scales)
    assert error(got, want) < 6e-3


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(32, 4, None), (14, 2, None), (14, 2, 300)]
)
def test_gqa_prefill(heads, kv_heads, window, page):
    lens = [300, 130, 71, 2000]
    table, lens_B, slots = paging(lens, page)
    q, k, v = randn(895, heads, 128), randn(slots, kv_heads, 128), randn(slots, kv_heads, 128)
    cu = torch.tensor([0, 1, 131, 195, 895], device=CUDA)
    split = split_queries(cu, 895, prefill.tile_tokens(heads // kv_heads))
    got = prefill.prefill_gqa(q, k, v, table, cu, lens_B, split, 0.088, page, window)
    want = prefill.prefill_gqa_twin(q, k, v, table, cu, lens_B, 0.088, page, window)
    assert error(got, want) < 8e-3


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(32, 4, None), (14, 2, None), (14, 2, 300)]
)
def test_gqa_prefill_over_an_fp8_cache(heads, kv_heads, window, page):
    """With an empty sequence, and room for more keys than there are."""
    lens, cu = [300, 130, 0, 71, 2000], torch.tensor([0, 1, 131, 131, 195, 895], device=CUDA)
    table, lens_B, slots = paging(lens, page)
    q = randn(895, heads, 128)
    (k, k_scale), (v, v_scale) = (quantised(randn(slots, kv_heads, 128)) for _ in "kv")
    cu_k = torch.tensor([0, 300, 430, 430, 501, 2501], device=CUDA)
    at = [table[b, i // page] * page + i % page
          for b, i in ((b, torch.arange(n, device=CUDA)) for b, n in enumerate(lens))]  # fmt: skip
    slots_N = torch.cat((*at, torch.zeros(3000, dtype=torch.int64, device=CUDA)))
    split = split_queries(cu, 895, prefill.tile_tokens(heads // kv_heads))
    got_k, got_v = gather_keys(k, v, (k_scale, v_scale), slots_N, cu_k, torch.bfloat16)
    got = prefill.prefill_gathered(q, got_k, got_v, cu, cu_k, lens_B, split, 0.088, window)
    k, v = k.float() * k_scale[..., None], v.float() * v_scale[..., None]
    want = prefill.prefill_gqa_twin(q, k, v, table, cu, lens_B, 0.088, page, window)
    assert error(got, want) < 1e-2


def test_mla_prefill():
    h, lens, cu = 16, [300, 130, 71, 2000], torch.tensor([0, 1, 131, 195, 895], device=CUDA)
    q, kv, key = randn(895, h, 192), randn(2501, h, 256), randn(2501, 576)[:, 512:]
    cu_k = torch.tensor([0, 300, 430, 501, 2501], device=CUDA)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    split = split_queries(cu, 895, prefill.tile_tokens(1))
    got = prefill.prefill_mla(
        q[..., :128], q[..., 128:], kv[..., :128], kv[..., 128:], key, cu, cu_k, lens_B, split, 0.07
    )
    k = torch.cat((kv[..., :128], key[:, None].expand(-1, h, -1)), -1)
    bounds = zip(*(pairwise(x.tolist()) for x in (cu, cu_k)), strict=True)
    want = [
        prefill.causal_twin(q[a:b], k[c:d], kv[c:d, :, 128:], 0.07) for (a, b), (c, d) in bounds
    ]
    assert error(got, torch.cat(want)) < 8e-3


def test_a_graph_replays_with_other_lengths_and_pages():
    table, lens, slots = paging([3000, 64, 1, 900], 16)
    q, k, v = randn(4, 32, 128), randn(slots, 4, 128), randn(slots, 4, 128)

    def step() -> Tensor:
        split = split_keys(lens, 64)
        return gqa.decode_gqa(q, k, v, table, lens, split, 0.088, 16)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for now in ([0, 64, 1, 900], [2999, 0, 0, 0], [1, 1, 1, 1]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        q.copy_(randn(4, 32, 128))
        table.copy_(table.flip(1) if max(now) == 1 else table)
        got.fill_(float("nan"))
        graph.replay()
        want = gqa.decode_gqa_twin(q, k, v, table, lens, 0.088, 16)
        assert error(got, want) < 6e-3


@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize("items", [1, 64])
def test_gqa_decode_keeps_what_a_sink_leaves(items, page):
    table, lens, slots = paging([4096, 700, 1], page)
    q = torch.zeros(3, 32, 128, device=CUDA, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    k = torch.zeros(slots, 4, 128, device=CUDA)
    k[..., 0] = 1.0
    k[table[:, 0] * page, :, 0] = 11.0
    v = 0.1 * (1 + torch.rand(slots, 4, 128, device=CUDA))
    v[table[:, 0] * page] *= 0.01
    (k, k_scale), (v, v_scale) = quantised(k), quantised(v)
    at = table, lens, split_keys(lens, items), 1.0, page
    got = gqa.decode_gqa(q, k, v, *at, scales=(k_scale, v_scale))
    want = gqa.decode_gqa_twin(q, k, v, *at[:2], *at[3:], scales=(k_scale, v_scale))
    assert error(got, want) < 6e-3


@pytest.mark.parametrize(("latents", "nats"), [(0.2, 10.0), (0.02, 8.0), (7000.0, 0.0)])
@pytest.mark.parametrize(("heads", "page"), [(16, 16), (32, 16), (64, 16), (128, 64), (64, 5)])
def test_mla_decode_keeps_what_a_sink_leaves(heads, page, latents, nats):
    """And the largest latents there are. The first value of each is its key: turned parts, which
    the Hopper kernel rounds, would move a sink's weight by itself."""
    table, lens, slots = paging([4096, 700, 1], page)
    q = torch.zeros(3, heads, 512, device=CUDA, dtype=torch.bfloat16)
    q[..., 0] = nats / latents
    q_rope = torch.zeros(3, heads, 64, device=CUDA, dtype=torch.bfloat16)
    latent = latents * (1 + torch.rand(slots, 512, device=CUDA)) / 2
    latent[:, 0] = latents
    if nats:
        latent[table[:, 0] * page, 1:] *= 0.01
        latent[table[:, 0] * page, 0] = 2 * latents
    parts = quantised(latent), quantised(randn(slots, 64))
    cache, scales = torch.cat([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1)
    for items in (1, 64):
        split = split_keys(lens, items)
        got = mla.decode_mla(q, q_rope, cache, table, lens, split, 1.0, page, scales)
        want = mla.decode_mla_twin(q, q_rope, cache, table, lens, 1.0, page, scales)
        assert error(got, want) < 6e-3


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_slots_that_nobody_has_written_give_zeros(heads):
    table, lens, slots = paging([300, 64], 16)
    fp8, none = torch.float8_e4m3fn, torch.zeros(slots, 4, device=CUDA)
    kv, split = torch.zeros(slots, 4, 128, device=CUDA).to(fp8), split_keys(lens, 4)
    out = gqa.decode_gqa(
        randn(2, heads, 128), kv, kv, table, lens, split, 1.0, 16, None, (none,) * 2
    )
    assert (out == 0).all()
    cache, none = torch.zeros(slots, 576, device=CUDA).to(fp8), torch.zeros(slots, 2, device=CUDA)
    q, q_rope = randn(2, heads, 512), randn(2, heads, 64)
    assert (mla.decode_mla(q, q_rope, cache, table, lens, split, 1.0, 16, none) == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [None, 16, 64], ids=["gqa", "mla-16", "mla-64"])
def test_what_is_not_finite_reaches_no_other_sequence(heads, fp8):
    """Written to page 0, which all tiles reach into beyond their sequence's end. The last sequence
    has it, and gives no numbers."""
    lens, slots = [70, 33, 1, 16], 16 * 16
    table = 1 + torch.arange(20, device=CUDA).view(4, 5)
    table[1, 3:] = table[2, 1:] = table[3] = 0
    lens_B = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    at = torch.arange(slots, device=CUDA)
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    split = split_keys(lens_B, 4)

    def rows(width: int) -> Tensor:
        x = randn(slots, width)
        x[:8], x[8:12], x[12:16] = float("nan"), float("inf"), -float("inf")
        return x

    if heads is None:
        cos, sin = torch.ones(slots, 128, device=CUDA), torch.zeros(slots, 128, device=CUDA)
        cache = [torch.zeros(slots, 4, 128, device=CUDA).to(kind) for _ in "kv"]
        cache += [torch.zeros(slots, 4, device=CUDA) for _ in "kv" if fp8]
        gqa_norm_rope_write(rows(40 * 128), None, False, 1e-6, None, cos, sin, at, at, tuple(cache))
        q, scales = randn(4, 32, 128), tuple(cache[2:]) or None
        got = gqa.decode_gqa(q, *cache[:2], table, lens_B, split, 0.088, 16, None, scales)
        want = gqa.decode_gqa_twin(q, *cache[:2], table, lens_B, 0.088, 16, None, scales)
        if not fp8:
            prompt = randn(sum(lens), 32, 128)
            cu = torch.tensor([0, 70, 103, 104, 120], device=CUDA)
            tiles = split_queries(cu, len(prompt), prefill.tile_tokens(8))
            seen = prefill.prefill_gqa(prompt, *cache, table, cu, lens_B, tiles, 0.088, 16)
            all_of = prefill.prefill_gqa_twin(prompt, *cache, table, cu, lens_B, 0.088, 16)
            assert error(seen[:104], all_of[:104]) < 8e-3 and seen[104:].isnan().all()
    else:
        cos, sin = torch.ones(slots, 64, device=CUDA), torch.zeros(slots, 64, device=CUDA)
        norm = torch.ones(512, device=CUDA, dtype=torch.bfloat16)
        cache = [torch.zeros(slots, 576, device=CUDA).to(kind)]
        cache += [torch.zeros(slots, 2, device=CUDA)] * fp8
        mla_norm_rope_write(
            randn(slots, heads, 64), rows(576), norm, 1e-6, cos, sin, at, at, tuple(cache)
        )
        q, q_rope, scales = randn(4, heads, 512), randn(4, heads, 64), cache[1] if fp8 else None
        got = mla.decode_mla(q, q_rope, cache[0], table, lens_B, split, 0.04, 16, scales)
        want = mla.decode_mla_twin(q, q_rope, cache[0], table, lens_B, 0.04, 16, scales)
    assert error(got[:3], want[:3]) < 8e-3 and got[3].isnan().all()
