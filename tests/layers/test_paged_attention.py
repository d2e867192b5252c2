"""Attention layers on kernels against their torch forms, over steps that share a paged cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from crossdock.cache import KVCache
from crossdock.core import (
    ConfigError,
    ForwardBatch,
    GQASpec,
    MLASpec,
    Plan,
    Request,
    RopeSpec,
    SamplingParams,
    Scheduled,
)
from crossdock.engine.batch import lay_out, make_batch
from crossdock.engine.prompt_inputs import PromptInputs
from crossdock.layers import GQAWeights, MLAWeights, Rope, SoloGroup, choose_products
from crossdock.layers.attention import paged_gqa, paged_mla, paged_plan
from crossdock.layers.attention.backend import choose_attention, triton_attention
from crossdock.layers.attention.paged_plan import PagedPlanner, in_turns

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


def build(spec: GQASpec | MLASpec, fp8_cache: bool = False):
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
    for backend in (torch_backend, triton_attention(DEVICE, fp8_cache)):
        make = backend.mla if isinstance(spec, MLASpec) else backend.gqa
        layers += [make(*args), backend.planner(spec, rope)]
    return layers


def cache_of(spec: GQASpec | MLASpec, fp8: bool = False) -> tuple[Tensor, ...]:
    dtype = torch.float8_e4m3fn if fp8 else torch.float32
    layer = KVCache(spec, 1, 64, PAGE, dtype, DEVICE).layer(0)
    for tensor in layer:
        tensor.copy_(torch.randn(tensor.shape))
    for scales in layer[len(layer) // 2 :] if fp8 else ():
        scales.abs_()
    return layer


def batch_of(table: Tensor, work: dict[int, tuple[int, int]]) -> ForwardBatch:
    """`work`: sequence (a row of `table`) to (tokens before, tokens now); decodes first."""
    order = sorted(work, key=lambda b: work[b][1] > 1)
    lens = tuple(work[b][1] for b in order)
    positions = torch.cat([torch.arange(work[b][0], sum(work[b])) for b in order])
    rows = torch.repeat_interleave(torch.tensor(order), torch.tensor(lens))
    slots = table[rows, positions // PAGE] * PAGE + positions % PAGE
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    decodes, kv_lens = sum(n == 1 for n in lens), tuple(sum(work[b]) for b in order)
    starts = torch.tensor((0, *lens[decodes:])).cumsum(0).int().to(DEVICE)
    positions = positions.to(DEVICE)
    return ForwardBatch(
        torch.zeros_like(positions), positions, slots.to(DEVICE), none, lens, kv_lens,
        table[order].to(DEVICE), none, decodes,
        torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
        starts if decodes < len(lens) else None,
    )  # fmt: skip


STEPS = (
    {0: (0, 5), 1: (0, 40), 2: (0, 17)},
    {0: (5, 1), 1: (40, 30), 2: (17, 1)},  # decodes beside a prefill with a cached prefix
    {0: (6, 1), 1: (70, 1), 2: (18, 1)},
    {0: (7, 9), 1: (71, 1), 2: (19, 30)},  # prefixes of several lengths
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


@pytest.mark.parametrize("name", SPECS)
def test_an_fp8_cache_costs_a_few_percent(name):
    """Of float32 attention; the torch form over the same codes is nearer."""
    spec = SPECS[name]
    theirs, their_planner, ours, our_planner = build(spec, fp8_cache=True)
    cache, small = cache_of(spec), cache_of(spec, fp8=True)
    twin = tuple(t.clone() for t in small)
    table = torch.randperm(60).view(3, 20)
    for work in STEPS:
        batch = batch_of(table, work)
        x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
        want = theirs(x, cache, their_planner(batch, PAGE))
        got = ours(x, small, our_planner(batch, PAGE))
        close(got, want, 0.06)
        torch_form = theirs(x, twin, their_planner(batch, PAGE))
        close(torch_form, want, 0.06)
        close(got, torch_form, 0.01)
        for a, b in zip(small[len(small) // 2 :], twin[len(twin) // 2 :], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["head norms", "window", "mla"])
def test_what_is_not_finite_stays_with_its_sequence(name, fp8):
    """Sequence 0 has page 0, which tiles of other sequences reach into, and the pages that sequence
    1 gets after it. It is told by keys, which stay as they are, to the end of its days."""
    spec = SPECS[name]
    for layer, planner in zip(*(iter(build(spec, fp8)),) * 2, strict=True):
        cache = cache_of(spec, fp8)
        table = torch.stack((torch.arange(20), torch.arange(20), 20 + torch.randperm(20)))
        x = torch.randn(40, H, device=DEVICE)
        x[3:9] = float("nan")
        x[11] = float("inf")
        layer(x, cache, planner(batch_of(table, {0: (0, 40)}), PAGE))
        values = cache[1::2]
        if isinstance(spec, MLASpec):
            values = (cache[0][:, : spec.kv_lora_rank], *(scales[:, 0] for scales in cache[1:]))
        assert all(tensor.float().isfinite().all() for tensor in values)
        for work in ({0: (40, 3)}, {0: (43, 1)}, {0: (44, 1), 2: (0, 1)}):
            batch = batch_of(table, work)
            x = torch.randn(batch.num_tokens, H, device=DEVICE)
            first = layer(x, cache, planner(batch, PAGE))[0]
            assert name == "window" or first.isnan().all()  # that has left them behind
        for work in ({1: (0, 5), 2: (0, 9)}, {1: (5, 1), 2: (9, 1)}, {2: (10, 3)}):
            batch = batch_of(table, work)
            x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
            assert layer(x, cache, planner(batch, PAGE)).isfinite().all()


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


@pytest.mark.parametrize(
    ("name", "heads", "wanted"),
    [("window", 3, [3, 1, 2, 2]), ("full norm, clip, bias", 1, [1, 1, 1, 1])],
)
def test_long_prompts_gather_the_heads_in_turns(name, heads, wanted, monkeypatch):
    """Over 62 keys and over 84."""
    spec = SPECS[name]
    theirs, their_planner, ours, our_planner = build(spec, fp8_cache=True)
    cache = cache_of(spec, fp8=True)
    other = tuple(t.clone() for t in cache)
    gather, turns = paged_gqa.gather_keys, []

    def counted(k_SgD: Tensor, *args):
        turns.append(k_SgD.shape[1])
        return gather(k_SgD, *args)

    monkeypatch.setattr(paged_gqa, "gather_keys", counted)
    monkeypatch.setattr(paged_gqa, "GATHERED_BYTES", 70 * 2 * 16 * 4 * heads)
    for work in (STEPS[0], {0: (5, 9), 1: (40, 30), 2: (17, 1)}):
        batch = batch_of(torch.randperm(60).view(3, 20), work)
        x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
        want = theirs(x, cache, their_planner(batch, PAGE))
        close(ours(x, other, our_planner(batch, PAGE)), want, 0.01)
    assert turns == wanted


def test_sequences_take_turns_where_keys_are_copied(monkeypatch):
    monkeypatch.setattr(paged_plan, "COPIED_KEYS", 60)
    lens = ([], [300], [20, 40, 1], [70, 10, 60, 61, 5])
    assert [[list(turn) for turn in in_turns(kv_lens)] for kv_lens in lens] == [
        [[]], [[0]], [[0, 1], [2]], [[0], [1], [2], [3], [4]],
    ]  # fmt: skip
    for name, fp8 in (("head norms", True), ("window", True), ("mla", False), ("mla", True)):
        spec = SPECS[name]
        theirs, their_planner, ours, our_planner = build(spec, fp8)
        cache = cache_of(spec, fp8)
        other = tuple(t.clone() for t in cache)
        for work, wanted in ((STEPS[0], [2, 1]), ({0: (5, 9), 1: (40, 30), 2: (17, 1)}, [1, 1])):
            batch = batch_of(torch.randperm(60).view(3, 20), work)
            x = torch.randn(batch.positions_T.shape[0], H, device=DEVICE)
            want = theirs(x, cache, their_planner(batch, PAGE))
            plan = our_planner(batch, PAGE)
            assert [len(turn.lens_B) for turn in plan.prefill.turns] == wanted
            close(ours(x, other, plan), want, 0.01 if fp8 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "fp8"), [("head norms", False), ("window", True), ("mla", False), ("mla", True)]
)
def test_the_host_waits_for_no_turn(name, fp8, monkeypatch):
    monkeypatch.setattr(paged_plan, "COPIED_KEYS", 60)
    spec = SPECS[name]
    _, _, layer, planner = build(spec, fp8)
    cache, table = cache_of(spec, fp8), torch.randperm(60).view(3, 20)
    batches = [batch_of(table, work) for work in (*STEPS, *STEPS)]
    xs = [torch.randn(batch.num_tokens, H, device=DEVICE) for batch in batches]
    for i, (x, batch) in enumerate(zip(xs, batches, strict=True)):
        if i >= len(STEPS):  # now all is compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, cache, planner(batch, PAGE))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["head norms", "mla"])
def test_rows_beyond_the_own_are_empty(name):
    spec = SPECS[name]
    _, _, layer, planner = build(spec)
    assert isinstance(planner, PagedPlanner)
    table = torch.randperm(60).view(3, 20)
    x = torch.randn(5, H, device=DEVICE)
    for work in ({0: (5, 1), 1: (40, 1), 2: (17, 1)}, {1: (41, 1)}):
        batch, n = batch_of(table, work), len(work)
        cache = cache_of(spec)
        before, other = (tuple(t.clone() for t in cache) for _ in range(2))
        got = layer(x, other, planner(with_empty_rows(batch, 5), PAGE))
        want = layer(x[:n], cache, planner(batch, PAGE))
        close(got[:n], want, 1e-6)
        assert (got[n:] == 0).all()
        untouched = torch.ones(len(cache[0]), dtype=torch.bool, device=DEVICE)
        untouched[batch.kv_slots_T] = False
        for a, b, c in zip(other, cache, before, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert torch.equal(a[untouched], c[untouched])


@pytest.mark.parametrize(
    ("name", "fp8"),
    [("head norms", False), ("window", False), ("mla", False), ("mla, query rank", False),
     ("head norms", True), ("window", True), ("mla", True)],
)  # fmt: skip
def test_a_captured_step_with_prompts_gives_the_same_rows(name, fp8):
    spec = SPECS[name]
    _, _, layer, planner = build(spec, fp8)
    inputs = PromptInputs(4, 80, 24, DEVICE)
    table = torch.randperm(60).view(3, 20)
    for work in (
        {0: (5, 1), 1: (40, 30), 2: (17, 1)},
        {0: (0, 5), 1: (0, 40), 2: (0, 17)},
        {1: (70, 1)},  # beside a rank that has a prompt
        {0: (8, 3), 2: (30, 2)},
    ):
        cache = cache_of(spec, fp8)
        other = tuple(t.clone() for t in cache)
        items = []
        for b in sorted(work, key=lambda b: work[b][1] > 1):
            start, count = work[b]
            request = Request(str(b), (0,) * 99, SamplingParams())
            pages = tuple(table[b, : -(-(start + count) // PAGE)].tolist())
            items.append(Scheduled(request, start, (7,) * count, pages, True))
        plan = Plan(tuple(items))
        eager = make_batch(plan, PAGE, DEVICE)
        inputs.load(lay_out(plan, PAGE), plan.num_decodes, 80, None)
        captured = inputs.batch(80, "off", 100)
        n = plan.num_tokens
        assert int(captured.rows_1) == n and (captured.kv_slots_T[n:] == -1).all()
        assert torch.equal(captured.sample_rows[: len(items)], eager.sample_rows)
        x = torch.randn(80, H, device=DEVICE)
        got = layer(x, other, planner(captured, PAGE))
        close(got[:n], layer(x[:n], cache, planner(eager, PAGE)), 1e-6)
        for a, b in zip(other, cache, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-5, atol=1e-5)


def with_empty_rows(batch: ForwardBatch, size: int) -> ForwardBatch:
    """As a captured step sees a batch of decodes: its lengths only on the device."""

    def pad(x: Tensor, empty: int) -> Tensor:
        more = x.new_full((size - len(x), *x.shape[1:]), empty)
        return torch.cat((x, more))

    return replace(
        batch,
        positions_T=pad(batch.positions_T, 0),
        kv_slots_T=pad(batch.kv_slots_T, -1),
        query_lens=(),
        kv_lens=(),
        page_table_BP=pad(batch.page_table_BP, 0),
        num_decodes=size,
        kv_lens_B=pad(batch.kv_lens_B, 0),
    )


def test_the_choice_is_named_and_refusals_say_why():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16 = torch.bfloat16
    assert choose_attention("auto", cpu, bf16, False).name == "torch"
    assert choose_attention("auto", cuda, torch.float32, False).name == "torch"
    assert choose_attention("auto", cpu, bf16, True).name == "torch"
    for name in ("auto", "torch"):
        assert choose_attention(name, cuda, bf16, True).name == "invariant"
    assert choose_attention("torch", cuda, bf16, False).reason == "as asked"
    with pytest.raises(ConfigError, match="need a GPU, not cpu"):
        choose_attention("triton", cpu, bf16, False)
    with pytest.raises(ConfigError, match="invariant mode"):
        choose_attention("triton", cuda, bf16, True)
