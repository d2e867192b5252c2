"""Attention with FlashInfer's kernels against its torch form. On a Hopper GPU with the library
itself, in 16 bits and replayed from graphs; elsewhere with a stand-in that does in torch what the
library is asked for, so that what is asked is right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.cache import KVCache
from crossdock.core import (
    CapacityError,
    ForwardBatch,
    GQASpec,
    MLASpec,
    Plan,
    Request,
    RopeSpec,
    SamplingParams,
    Scheduled,
)
from crossdock.core.batch import CapturedStep, GraphSize
from crossdock.engine.batch import lay_out, make_batch
from crossdock.engine.prompt_inputs import PromptInputs
from crossdock.kernels.decode_inputs import DecodeInputs
from crossdock.layers import GQAWeights, MLAWeights, Rope, SoloGroup, choose_products
from crossdock.layers.attention import AttentionCase, choose_attention, flashinfer_layers
from crossdock.layers.attention.backend import flashinfer_attention
from crossdock.layers.attention.flashinfer_library import load_flashinfer, why_not_flashinfer
from crossdock.layers.attention.flashinfer_plan import FlashDecodes, FlashPrompts
from crossdock.layers.attention.paged_plan import PagedDecode, PagedPrefill

H, SEQUENCES, PAGES = 64, 4, 24
STEPS: tuple[dict[int, tuple[int, int]], ...] = (  # sequence to (tokens before, tokens now)
    {0: (0, 5), 1: (0, 40), 2: (0, 17)},
    {0: (5, 1), 1: (40, 30), 2: (17, 1)},  # decodes beside a prompt with a cached prefix
    {0: (6, 1), 1: (70, 1), 2: (18, 1)},
    {1: (71, 1)},
    {0: (7, 3), 2: (19, 2)},
)


def attend(q_ThD: Tensor, k_NgD: Tensor, v_NgV: Tensor, scale: float) -> Tensor:
    """The rows are the last of as many keys."""
    group = q_ThD.shape[1] // k_NgD.shape[1]
    k_NhD, v_NhV = (x.repeat_interleave(group, 1) for x in (k_NgD, v_NgV))
    scores_hTN = torch.einsum("thd,nhd->htn", q_ThD, k_NhD) * scale
    T, N = scores_hTN.shape[1:]
    hidden_TN = torch.ones(T, N, dtype=torch.bool).triu(N - T + 1)
    weights_hTN = scores_hTN.masked_fill(hidden_TN, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhv->thv", weights_hTN, v_NhV)


class PagedStandIn:
    def __init__(
        self, workspace, layout, backend, use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
    ):  # fmt: skip
        assert (layout, backend) == ("NHD", "fa3")
        self.fixed, self.indices, self.most = use_cuda_graph, paged_kv_indices_buf, None
        self.batch = len(qo_indptr_buf) - 1 if use_cuda_graph else None

    def plan(
        self, rows, entries, indices, last, heads, kv_heads, dim, page, *, causal, sm_scale,
        q_data_type, kv_data_type, seq_lens,
    ):  # fmt: skip
        assert causal and all(
            x.dtype == torch.int32 for x in (rows, entries, indices, last, seq_lens)
        )
        assert len(rows) == len(entries) == len(last) + 1 == len(seq_lens) + 1
        if self.fixed:
            self.most = self.most or int(rows[-1])
            assert len(last) == self.batch and int(rows[-1]) <= self.most
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indices = indices
        self.planned = [x.tolist() for x in (rows, entries, seq_lens)]
        self.page, self.scale, self.heads = page, sm_scale, (heads, kv_heads, dim)

    def run(self, q, kv, out):
        rows, entries, lens = self.planned
        assert (q.shape[1], kv[0].shape[2], q.shape[2]) == self.heads and len(q) >= rows[-1]
        for i, keys in enumerate(lens):
            if rows[i] == rows[i + 1]:
                continue
            pages = self.indices[entries[i] : entries[i] + -(-keys // self.page)].long()
            k, v = (x[pages].flatten(0, 1)[:keys] for x in kv)
            mine = slice(rows[i], rows[i + 1])
            out[mine] = attend(q[mine], k, v, self.scale)
        return out


class LatentStandIn:
    def __init__(self, workspace, backend):
        assert backend == "fa3"

    def plan(
        self, rows, entries, indices, lens, heads, latent, rotated, page, causal, scale, *types
    ):
        assert all(x.dtype == torch.int32 for x in (rows, entries, indices, lens))
        assert rows.tolist() == list(range(len(lens) + 1)) and not causal and len(types) == 2
        self.entries, self.lens, self.indices = entries.tolist(), lens.tolist(), indices
        self.page, self.scale, self.dims = page, scale, (heads, latent, rotated)

    def run(self, q, q_rotated, latents, keys):
        assert (*q.shape[1:], q_rotated.shape[2]) == self.dims and len(q) == len(self.lens)
        out = torch.zeros_like(q)
        for i, n in enumerate(self.lens):
            pages = self.indices[self.entries[i] : self.entries[i] + -(-n // self.page)].long()
            c, k = (x[pages].flatten(0, 1)[:n] for x in (latents, keys))
            if n:
                whole, both = torch.cat((q[i], q_rotated[i]), -1), torch.cat((c, k), -1)
                out[i] = attend(whole[None], both[:, None], c[:, None], self.scale)[0]
        return out


class StandIn:
    __version__ = "none"
    BatchPrefillWithPagedKVCacheWrapper = PagedStandIn
    BatchMLAPagedAttentionWrapper = LatentStandIn


@dataclass(frozen=True)
class Machine:
    library: Any
    device: torch.device
    dtype: torch.dtype
    specs: dict[str, GQASpec | MLASpec]
    error: float
    page: int


SMALL = {"gqa": GQASpec(4, 2, 16, qk_norm="head"), "mla": MLASpec(4, 24, 32, 16, 8, 16)}
LARGE = {
    "gqa": GQASpec(16, 2, 128, qk_norm="head"),
    "mla": MLASpec(128, 96, 512, 128, 64, 128),
    "mla, few heads": MLASpec(16, None, 512, 128, 64, 128),
}


@pytest.fixture(params=["stand-in", pytest.param("library", marks=pytest.mark.gpu)])
def machine(request):
    torch.set_num_threads(1)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        if request.param == "library":
            yield with_library()
        elif torch.cuda.is_available():
            pytest.skip("Triton's kernels are compiled here, which the stand-in's are not")
        else:
            yield Machine(StandIn, torch.device("cpu"), torch.float32, SMALL, 1e-5, 8)
    torch.backends.cuda.matmul.allow_tf32 = allowed


def with_library() -> Machine:
    cuda, dtype = torch.device("cuda", 0), torch.bfloat16
    for spec in LARGE.values():
        why_not = why_not_flashinfer(AttentionCase(spec, 1.0, False), cuda, dtype)
        if why_not is not None:
            pytest.skip(f"FlashInfer: {why_not}")
    return Machine(load_flashinfer(), cuda, dtype, LARGE, 0.03, 16)


@dataclass(frozen=True)
class Layers:
    """The torch form in float32, and FlashInfer's in the machine's dtype, each with its planner and
    a cache; both hold the same."""

    twin: tuple[Any, Callable, tuple[Tensor, ...]]
    flash: tuple[Any, Any, tuple[Tensor, ...]]


def build(machine: Machine, name: str) -> Layers:
    spec, device, dtype = machine.specs[name], machine.device, machine.dtype
    mla = isinstance(spec, MLASpec)
    weights = weights_of(spec, machine)
    exact = type(weights)(*(x if x is None else x.float() for x in vars(weights).values()))
    scale = 0.1 if isinstance(spec, MLASpec) else spec.head_dim**-0.5
    case = AttentionCase(spec, scale, False)
    dim = spec.qk_rope_head_dim if isinstance(spec, MLASpec) else spec.head_dim
    backends = (
        choose_attention("torch", device, torch.float32, False),
        flashinfer_attention(machine.library, case, device, dtype),
    )
    cache = [torch.randn_like(x).to(dtype) for x in cache_of(spec, machine)]
    made = []
    for backend in backends:
        kind = torch.float32 if backend.name == "torch" else dtype
        rope = Rope(RopeSpec(dim, 1e4), 400, kind, device)
        given = exact if backend.name == "torch" else weights
        args = (spec, given, 1e-6, *([scale] if mla else []), choose_products(False), SoloGroup())
        layer = (backend.mla if mla else backend.gqa)(*args)
        made.append((layer, backend.planner(spec, rope), tuple(x.to(kind).clone() for x in cache)))
    return Layers(*made)


def cache_of(spec: GQASpec | MLASpec, machine: Machine) -> tuple[Tensor, ...]:
    return KVCache(spec, 1, 64, machine.page, machine.dtype, machine.device).layer(0)


def weights_of(spec: GQASpec | MLASpec, machine: Machine) -> Any:
    def randn(*shape: int) -> Tensor:
        x = torch.randn(shape, device=machine.device) * shape[-1] ** -0.5
        return x.to(machine.dtype)

    def one(n: int) -> Tensor:
        return (torch.rand(n, device=machine.device) + 0.5).to(machine.dtype)

    if isinstance(spec, GQASpec):
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        norms = one(spec.head_dim), one(spec.head_dim)
        return GQAWeights(randn(q + 2 * kv, H), randn(H, q), None, None, *norms)
    q = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    rank, L = spec.q_lora_rank, spec.kv_lora_rank
    up = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    return MLAWeights(
        randn((rank or q) + spec.kv_width, H), one(L), randn(up, L),
        randn(H, spec.num_heads * spec.v_head_dim), rank and one(rank), rank and randn(q, rank),
    )  # fmt: skip


def plan_of(work: dict[int, tuple[int, int]], table: Tensor, page: int) -> Plan:
    items = []
    for b in sorted(work, key=lambda b: work[b][1] > 1):
        start, count = work[b]
        request = Request(str(b), (0,) * 99, SamplingParams())
        pages = tuple(table[b, : -(-(start + count) // page)].tolist())
        items.append(Scheduled(request, start, (7,) * count, pages, True))
    return Plan(tuple(items))


def step_of(plan: Plan, size: GraphSize, page: int, tokens: int) -> CapturedStep:
    host = lay_out(plan, page)
    lens = host.query_lens_B, host.kv_lens_B
    return CapturedStep(size, plan.num_decodes, *lens, SEQUENCES, tokens, PAGES, page)


def close(got: Tensor, want: Tensor, error: float) -> None:
    assert float((got.float() - want).norm() / want.norm()) < error


def inputs(machine: Machine, rows: int) -> tuple[Tensor, Tensor]:
    """In the machine's dtype, and the same in float32."""
    x = torch.randn(rows, H, device=machine.device).to(machine.dtype)
    return x, x.float()


NAMES = ("gqa", "mla", "mla, few heads")


def skip_missing(machine: Machine, name: str) -> None:
    if name not in machine.specs:
        pytest.skip("only at real widths")


@pytest.mark.parametrize("name", NAMES)
def test_eager_steps_match_the_torch_form(machine, name):
    skip_missing(machine, name)
    layers, table = build(machine, name), torch.randperm(60).view(3, 20)
    twin, their_planner, cache = layers.twin
    layer, planner, own = layers.flash
    for work in STEPS:
        batch = make_batch(plan_of(work, table, machine.page), machine.page, machine.device)
        x, exact = inputs(machine, batch.num_tokens)
        plan = planner(batch, machine.page)
        kinds = (type(plan.decode), FlashPrompts) if name == "gqa" else (FlashDecodes, PagedPrefill)
        assert plan.decode is None or isinstance(plan.decode, kinds[0])
        assert plan.prefill is None or isinstance(plan.prefill, kinds[1])
        got = layer(x, own, plan)
        close(got, twin(exact, cache, their_planner(batch, machine.page)), machine.error)


@pytest.mark.parametrize("name", NAMES)
def test_steps_as_captured_match_the_torch_form(machine, name):
    """Prompts of any kind beside decodes, with empty rows and empty sequences."""
    skip_missing(machine, name)
    layers, table = build(machine, name), torch.randperm(60).view(3, 20)
    twin, their_planner, cache = layers.twin
    layer, planner, own = layers.flash
    held = PromptInputs(SEQUENCES, 80, PAGES, machine.device)
    for work in STEPS:
        plan = plan_of(work, table, machine.page)
        n = plan.num_tokens
        held.load(lay_out(plan, machine.page), plan.num_decodes, 80, None)
        planner.lay_out(step_of(plan, GraphSize(True, 80), machine.page, 96))
        x, exact = inputs(machine, 80)
        got = layer(x, own, planner(held.batch(80, "off", 100), machine.page))
        batch = make_batch(plan, machine.page, machine.device)
        close(got[:n], twin(exact[:n], cache, their_planner(batch, machine.page)), machine.error)


def test_empty_rows_of_captured_decodes_are_zero(machine):
    layers, table = build(machine, "mla"), torch.randperm(60).view(3, 20)
    twin, their_planner, cache = layers.twin
    layer, planner, own = layers.flash
    held = DecodeInputs.empty(SEQUENCES, PAGES, machine.device)
    for work in STEPS[2:4]:
        plan = plan_of(work, table, machine.page)
        n, batch = plan.num_decodes, make_batch(plan, machine.page, machine.device)
        for rows in (SEQUENCES, 3):
            planner.lay_out(step_of(plan, GraphSize(False, rows), machine.page, 96))
            captured = as_captured(held, batch, rows)
            x, exact = inputs(machine, rows)
            plan_there = planner(captured, machine.page)
            assert isinstance(plan_there.decode, FlashDecodes)
            got = layer(x, own, plan_there)
            want = twin(exact[:n], cache, their_planner(batch, machine.page))
            close(got[:n], want, machine.error)
            assert (got[n:] == 0).all()


def as_captured(held: DecodeInputs, batch: ForwardBatch, rows: int) -> ForwardBatch:
    """A batch of decodes in the buffers that a graph of so many rows reads."""
    n = batch.num_decodes
    held.lens_B.zero_()
    held.slots_B.fill_(-1)
    held.positions_B[:n], held.slots_B[:n] = batch.positions_T, batch.kv_slots_T
    held.lens_B[:n] = batch.kv_lens_B
    held.table_BP[:n, : batch.page_table_BP.shape[1]] = batch.page_table_BP
    held.rows_3.fill_(n)
    return captured_decodes(held, rows)


def captured_decodes(held: DecodeInputs, rows: int) -> ForwardBatch:
    return ForwardBatch(
        held.tokens_B[:rows], held.positions_B[:rows], held.slots_B[:rows], held.keys_B[:rows],
        (), (), held.table_BP[:rows], held.tokens_B[:0], rows, held.lens_B[:rows],
        overlap="off", rows_1=held.rows_3[:1],
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES[:2])
def test_halves_are_left_to_triton(machine, name):
    planner = build(machine, name).flash[1]
    plan = plan_of(STEPS[1], torch.randperm(60).view(3, 20), machine.page)
    for overlap in ("tbo", "sbo"):
        batch = make_batch(plan, machine.page, machine.device, overlap=overlap)
        got = planner(batch, machine.page)
        triton = isinstance(got.decode, PagedDecode), isinstance(got.prefill, PagedPrefill)
        assert triton == ((True, True) if overlap == "tbo" else (name == "gqa", name == "mla"))


def test_a_cache_too_large_for_its_offsets_is_refused(machine, monkeypatch):
    layers = build(machine, "mla")
    layer, planner, own = layers.flash
    plan = plan_of(STEPS[2], torch.randperm(60).view(3, 20), machine.page)
    batch = make_batch(plan, machine.page, machine.device)
    monkeypatch.setattr(flashinfer_layers, "_ADDRESSABLE", own[0].numel() - 1)
    with pytest.raises(CapacityError, match=r"at most .* tokens of latent cache, and there are"):
        layer(inputs(machine, 3)[0], own, planner(batch, machine.page))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_graphs_replayed_one_after_another_without_waiting(machine, name):
    """Several sizes share what is laid out; no replay may see the next one's layout."""
    layers, table = build(machine, name), torch.randperm(60).view(3, 20)
    sizes = (96, 80)
    held = PromptInputs(SEQUENCES, 96, PAGES, machine.device)
    layer, planner, own = layers.flash
    given = torch.zeros(96, H, dtype=machine.dtype, device=machine.device)
    graphs = {}
    for size in sizes:
        nothing = Plan(())
        held.load(lay_out(nothing, machine.page), 0, size, None)
        planner.lay_out(step_of(nothing, GraphSize(True, size), machine.page, 96))

        def run(size: int = size) -> Tensor:
            captured = held.batch(size, "off", 120)
            return layer(given[:size], own, planner(captured, machine.page))

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        graphs[size] = graph, out
    results, works = [], [work for _ in range(6) for work in STEPS]
    spin = torch.randn(4096, 4096, device=machine.device)
    for turn, work in enumerate(works):
        plan, size = plan_of(work, table, machine.page), sizes[turn % 2]
        x, _ = inputs(machine, size)
        spin = (spin @ spin).clamp_(-1, 1)  # the device falls behind
        given[:size].copy_(x)
        held.load(lay_out(plan, machine.page), plan.num_decodes, size, None)
        planner.lay_out(step_of(plan, GraphSize(True, size), machine.page, 96))
        graphs[size][0].replay()
        results.append((plan, x, graphs[size][1].clone()))
    twin, their_planner, cache = layers.twin
    for plan, x, got in results:
        n, batch = plan.num_tokens, make_batch(plan, machine.page, machine.device)
        close(
            got[:n], twin(x[:n].float(), cache, their_planner(batch, machine.page)), machine.error
        )
