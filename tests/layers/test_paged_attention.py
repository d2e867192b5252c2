"""Attention layers on kernels against their torch forms, over steps that share a paged cache."""

import pytest
import torch
from torch import Tensor

from crossdock.cache import KVCache
from crossdock.core import ConfigError, ForwardBatch, GQASpec, MLASpec, RopeSpec
from crossdock.layers import GQAWeights, MLAWeights, Rope, SoloGroup, choose_products
from crossdock.layers.attention import paged_mla
from crossdock.layers.attention.backend import choose_attention, triton_attention
from crossdock.layers.attention.paged_plan import DecodeBuffers, PagedPlanner

H, PAGE = 32, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = {
    "head norms": GQASpec(4, 2, 16, qk_norm="head"),
    "full norm, clip, bias": GQASpec(6, 2, 16, qk_norm="full", bias=True, clip_qkv=1.0),
    "window": GQASpec(4, 4, 16, sliding_window=11),
    "mla": MLASpec(4, None, 32, 16, 8, 16),
    "mla, query rank": MLASpec(3, 24, 32, 16, 8, 24),
}


@pytest.fixture(autouse=True)
def exact():
    torch.set_num_threads(1)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5


def one(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) + 0.5


def build(spec: GQASpec | MLASpec):
    """(torch layer, its planner, kernels' layer, its planner)."""
    products, group = choose_products(False), SoloGroup()
    if isinstance(spec, MLASpec):
        q = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        rank, L = spec.q_lora_rank, spec.kv_lora_rank
        up = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        weights = MLAWeights(
            randn((rank or q) + spec.kv_width, H), one(L), randn(up, L),
            randn(H, spec.num_heads * spec.v_head_dim), rank and one(rank), rank and randn(q, rank),
        )  # fmt: skip
        args, dim = (spec, weights, 1e-6, 0.3, products, group), spec.qk_rope_head_dim
    else:
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        norms = {"none": None, "head": (spec.head_dim,) * 2, "full": (q, kv)}[spec.qk_norm]
        weights = GQAWeights(
            randn(q + 2 * kv, H), randn(H, q), randn(q + 2 * kv) if spec.bias else None, None,
            norms and one(norms[0]), norms and one(norms[1]),
        )  # fmt: skip
        args, dim = (spec, weights, 1e-6, products, group), spec.head_dim
    rope = Rope(RopeSpec(dim, 1e4), 400, torch.float32, DEVICE)
    torch_backend = choose_attention("torch", DEVICE, torch.float32, False)
    layers = []
    for backend in (torch_backend, triton_attention(DEVICE)):
        make = backend.mla if isinstance(spec, MLASpec) else backend.gqa
        layers += [make(*args), backend.planner(spec, rope)]
    return layers


def cache_of(spec: GQASpec | MLASpec, fp8: bool = False) -> tuple[Tensor, ...]:
    layer = KVCache(spec, 1, 64, PAGE, torch.float32, DEVICE).layer(0)
    for tensor in layer:
        tensor.normal_()
    if not fp8:
        return layer
    width = 2 if isinstance(spec, MLASpec) else layer[0].shape[1]
    scales = tuple(torch.zeros(len(t), width, device=DEVICE) for t in layer)
    return tuple(t.to(torch.float8_e4m3fn) for t in layer) + scales


def batch_of(table: Tensor, work: dict[int, tuple[int, int]]) -> ForwardBatch:
    """`work`: sequence (a row of `table`) to (tokens before, tokens now); decodes first."""
    order = sorted(work, key=lambda b: work[b][1] > 1)
    lens = tuple(work[b][1] for b in order)
    positions = torch.cat([torch.arange(work[b][0], sum(work[b])) for b in order])
    rows = torch.repeat_interleave(torch.tensor(order), torch.tensor(lens))
    slots = table[rows, positions // PAGE] * PAGE + positions % PAGE
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        none, positions.to(DEVICE), slots.to(DEVICE), none, lens,
        tuple(sum(work[b]) for b in order), table[order].to(DEVICE), none,
        sum(n == 1 for n in lens),
    )  # fmt: skip


STEPS = (
    {0: (0, 5), 1: (0, 40), 2: (0, 17)},
    {0: (5, 1), 1: (40, 30), 2: (17, 1)},  # decodes beside a prefill with a cached prefix
    {0: (6, 1), 1: (70, 1), 2: (18, 1)},
)


def close(got: Tensor, want: Tensor, relative: float) -> None:
    assert float((got - want).norm() / want.norm()) < relative


@pytest.mark.parametrize("name", SPECS)
def test_steps_match_the_torch_form(name):
    spec = SPECS[name]
    theirs, their_planner, ours, our_planner = build(spec)
    cache = cache_of(spec)
    other = tuple(t.clone() for t in cache)
    table = torch.randperm(60).view(3, 20)
    for work in STEPS:
        batch = batch_of(table, work)
        x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
        want = theirs(x, cache, their_planner(batch, PAGE))
        got = ours(x, other, our_planner(batch, PAGE))
        close(got, want, 1e-5)
        for a, b in zip(other, cache, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["head norms", "mla"])
def test_an_fp8_cache_costs_a_few_percent(name):
    spec = SPECS[name]
    theirs, their_planner, ours, our_planner = build(spec)
    cache, small = cache_of(spec), cache_of(spec, fp8=True)
    table = torch.randperm(60).view(3, 20)
    for work in STEPS:
        batch = batch_of(table, work)
        x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
        want = theirs(x, cache, their_planner(batch, PAGE))
        close(ours(x, small, our_planner(batch, PAGE)), want, 0.06)


def test_long_prefills_take_the_heads_in_turns(monkeypatch):
    spec = SPECS["mla"]
    theirs, their_planner, ours, our_planner = build(spec)
    cache = cache_of(spec)
    other = tuple(t.clone() for t in cache)
    monkeypatch.setattr(paged_mla, "EXPANDED_BYTES", 62 * 32 * 4 * 3)  # three heads of four
    batch = batch_of(torch.randperm(60).view(3, 20), STEPS[0])
    x = torch.randn(62, H, device=DEVICE)
    want = theirs(x, cache, their_planner(batch, PAGE))
    close(ours(x, other, our_planner(batch, PAGE)), want, 1e-5)


@pytest.mark.parametrize("name", ["head norms", "mla"])
def test_rows_beyond_the_own_are_empty(name):
    spec = SPECS[name]
    _, _, layer, planner = build(spec)
    assert isinstance(planner, PagedPlanner)
    table = torch.randperm(60).view(3, 20)
    buffers = DecodeBuffers(6, 24, PAGE, DEVICE)
    x = torch.randn(5, H, device=DEVICE)
    for work in ({0: (5, 1), 1: (40, 1), 2: (17, 1)}, {1: (41, 1)}):
        batch = batch_of(table, work)
        n = len(work)
        cache = cache_of(spec)
        before, other = (tuple(t.clone() for t in cache) for _ in range(2))
        buffers.load(batch)
        got = layer(x, other, buffers.plan(planner, 5))
        want = layer(x[:n], cache, planner(batch, PAGE))
        close(got[:n], want, 1e-6)
        assert (got[n:] == 0).all() and int(buffers.rows_1) == n
        untouched = torch.ones(len(cache[0]), dtype=torch.bool, device=DEVICE)
        untouched[batch.kv_slots_T] = False
        for a, b, c in zip(other, cache, before, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert torch.equal(a[untouched], c[untouched])
    with pytest.raises(ValueError, match="decodes of 24 pages"):
        buffers.load(batch_of(table, {0: (0, 5)}))


def test_the_choice_is_named_and_refusals_say_why():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16 = torch.bfloat16
    assert choose_attention("auto", cpu, bf16, False).name == "torch"
    assert choose_attention("auto", cuda, torch.float32, False).name == "torch"
    assert choose_attention("auto", cuda, bf16, True).name == "torch"
    assert choose_attention("torch", cuda, bf16, False).reason == "as asked"
    with pytest.raises(ConfigError, match="need a GPU, not cpu"):
        choose_attention("triton", cpu, bf16, False)
    with pytest.raises(ConfigError, match="invariant mode"):
        choose_attention("triton", cuda, bf16, True)
