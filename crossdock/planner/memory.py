"""What fits: the bytes of one GPU by part, the KV tokens that are left, the smallest EP size."""

import math
from dataclasses import dataclass, fields, replace

from crossdock.core import EngineConfig, GQASpec, ModelSpec
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.core.staging import LOW_LATENCY_TOKENS, Staging
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Workload

EXPERT_WORKSPACE_BYTES = 256 << 20
"""What the experts hold of gathered rows and products at once; more rows go in waves."""
LIBRARY_BYTES = 1 << 30
"""CUDA context, cuBLAS and NCCL of one process on a Hopper GPU, rounded up."""
MEMORY_SHARE = 0.9
"""Of a GPU's memory that may be filled."""
GRAPH_BYTES = 1 << 30
"""Captured decode graphs, which share one pool: engines report 0.5 to 2 GiB."""
SAMPLED_ROWS = 512
"""Sequences whose logits a mixed step makes at once, at most."""
RECEIVED_HEADROOM = 2.0
"""Rows on the busiest rank over the mean, for tensors sized by what really comes."""
_ACTIVATION_BYTES = DTYPE_BYTES["bfloat16"]


@dataclass(frozen=True)
class Weights:
    """Bytes by part. `shared`: shared experts and routers; `embeddings`: with the LM head."""

    attention: int
    dense: int
    shared: int
    experts: int
    embeddings: int

    @property
    def total(self) -> int:
        return self.attention + self.dense + self.shared + self.experts + self.embeddings


@dataclass(frozen=True)
class MemoryPlan:
    """One GPU of `layout`, in bytes; `kv_tokens` and `requests` of one attention group.

    `transport`: symmetric buffers. `staging`: where a layer's experts arrive when they move.
    `length`: tokens of KV that a request comes to hold. `short`:
    empty where at least one request fits, else which number is short and by how much.
    """

    hardware: str
    layout: Layout
    memory_bytes: int
    budget_bytes: int
    weights: Weights
    transport: int
    staging: int
    activations: int
    workspaces: int
    graphs: int
    kv_bytes_per_token: int
    length: int

    @property
    def used_bytes(self) -> int:
        """All but KV."""
        buffers = self.transport + self.staging + self.activations
        return self.weights.total + buffers + self.rest_bytes

    @property
    def rest_bytes(self) -> int:
        return self.workspaces + self.graphs

    @property
    def short_bytes(self) -> int:
        """What is missing even without KV."""
        return max(0, self.used_bytes - self.budget_bytes)

    @property
    def kv_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes)

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_per_token

    @property
    def requests(self) -> int:
        return self.kv_tokens // self.length

    @property
    def fits(self) -> bool:
        return self.requests > 0

    @property
    def short(self) -> str:
        if self.fits:
            return ""
        if self.short_bytes:
            name, largest = max(self.parts().items(), key=lambda part: part[1])
            return (
                f"memory per GPU: {self.used_bytes / 1e9:.1f} GB are needed, "
                f"{self.budget_bytes / 1e9:.1f} GB may be filled: short by "
                f"{self.short_bytes / 1e9:.1f} GB, without any KV; the largest part is {name}, "
                f"{largest / 1e9:.1f} GB"
            )
        return (
            f"KV cache: room for {self.kv_tokens:,} tokens, one request needs {self.length:,}: "
            f"short by {self.length - self.kv_tokens:,} tokens "
            f"({(self.length - self.kv_tokens) * self.kv_bytes_per_token / 1e9:.2f} GB)"
        )

    def parts(self) -> dict[str, int]:
        weights = {f.name: getattr(self.weights, f.name) for f in fields(Weights)}
        names = ("transport", "staging", "activations", "workspaces", "graphs")
        return {**weights, **{name: getattr(self, name) for name in names}}

    def lines(self) -> list[str]:
        lines = [f"{name:<12}{nbytes / 1e9:9.2f} GB" for name, nbytes in self.parts().items()]
        lines.append(f"{'sum':<12}{self.used_bytes / 1e9:9.2f} GB")
        lines.append(
            f"{'budget':<12}{self.budget_bytes / 1e9:9.2f} GB, "
            f"{self.budget_bytes / self.memory_bytes:.0%} of {self.memory_bytes / 1e9:.2f} GB "
            f"({self.hardware})"
        )
        if self.short_bytes:
            return [*lines, self.short]
        lines.append(
            f"{'KV':<12}{self.kv_bytes / 1e9:9.2f} GB / {self.kv_bytes_per_token:,} B = "
            f"{self.kv_tokens:,} tokens = {self.requests:,} requests of {self.length:,} per "
            "attention group"
        )
        return lines if self.fits else [*lines, self.short]


def matrix_bytes(spec: ModelSpec, params: int, dtype: str) -> int:
    """Of weights in `dtype`; FP8 has one fp32 scale per block."""
    nbytes = params * DTYPE_BYTES[dtype]
    if dtype.startswith("float8"):
        rows, columns = spec.quant.block if spec.quant else (128, 128)
        nbytes += -(-params // (rows * columns)) * DTYPE_BYTES["float32"]
    return nbytes


def expert_bytes(spec: ModelSpec, dtype: str) -> int:
    """Of one routed expert in all MoE layers: what one redundant expert per rank costs."""
    return len(spec.moe_layers) * matrix_bytes(spec, spec.expert_params, dtype)


def whole_weights(spec: ModelSpec, dtype: str) -> Weights:
    """Of the whole model. Embeddings, head and routers stay in BF16, as checkpoints hold them."""
    one = Layout("both", spec.moe.num_experts, weights_dtype=dtype)
    return replace(
        rank_weights(spec, one), experts=spec.moe.num_experts * expert_bytes(spec, dtype)
    )


def slots_per_rank(spec: ModelSpec, layout: Layout) -> int:
    """Physical expert slots of a GPU in each MoE layer."""
    return -(-spec.moe.num_experts // layout.gpus) + layout.redundant_per_rank


def rank_weights(spec: ModelSpec, layout: Layout, whole_vocab: bool = False) -> Weights:
    """Of one GPU. Heads are sharded over `tp`, the vocabulary too unless `whole_vocab`; dense
    layers, shared experts and routers are whole on each GPU where experts lie by EP (they then see
    the GPU's own tokens), and sharded over `tp` as the experts are where those are."""
    h, dtype, n_moe = spec.hidden_size, layout.weights_dtype, len(spec.moe_layers)
    by_tp = layout.tp if layout.experts == "tp" else 1
    vocab = spec.vocab_size if whole_vocab else -(-spec.vocab_size // layout.tp)
    one = expert_bytes(spec, dtype)
    experts = slots_per_rank(spec, layout) * one
    if layout.experts == "tp":
        experts = -(-spec.moe.num_experts * one // layout.tp)
    plain = DTYPE_BYTES["bfloat16"]
    dense = (spec.num_layers - n_moe) * 3 * h * spec.intermediate_size
    shared = n_moe * 3 * h * spec.moe.shared_intermediate_size
    return Weights(
        attention=spec.num_layers * matrix_bytes(spec, attention_params(spec, layout.tp), dtype),
        dense=matrix_bytes(spec, -(-dense // by_tp), dtype),
        shared=matrix_bytes(spec, -(-shared // by_tp), dtype)
        + n_moe * h * spec.moe.num_experts * plain,
        experts=experts,
        embeddings=vocab * h * (1 if spec.tie_word_embeddings else 2) * plain,
    )


def attention_params(spec: ModelSpec, tp: int) -> int:
    """Of one layer on one of `tp` ranks: heads are sharded; MLA's down-projections are not, nor
    are KV heads once there are fewer than ranks."""
    h, a = spec.hidden_size, spec.attention
    heads = -(-a.num_heads // tp)
    if isinstance(a, GQASpec):
        return h * a.head_dim * 2 * (heads + _kv_heads(a, tp))
    down = h * (a.kv_width + (a.q_lora_rank or 0))
    per_head = (a.qk_nope_head_dim + a.qk_rope_head_dim) * (a.q_lora_rank or h)
    per_head += a.kv_lora_rank * (a.qk_nope_head_dim + a.v_head_dim) + a.v_head_dim * h
    return down + heads * per_head


def _kv_heads(attention: GQASpec, tp: int) -> int:
    return max(1, -(-attention.num_kv_heads // tp))


def kv_bytes_per_token(spec: ModelSpec, dtype: str, tp: int = 1) -> int:
    """On one of `tp` ranks: KV heads are sharded, MLA's latent is whole on each."""
    a = spec.attention
    width = 2 * _kv_heads(a, tp) * a.head_dim if isinstance(a, GQASpec) else a.kv_width
    return spec.num_layers * width * DTYPE_BYTES[dtype]


def transport_bytes(spec: ModelSpec, layout: Layout) -> int:
    """Symmetric buffers for all ranks' tokens at once (more than `max_dispatch_tokens` of a rank
    travel in pieces), and a second set for small steps, which is what this version's NVLink
    transport takes; BF16 rows home, rows out in FP8 where the weights are. None without EP."""
    if layout.experts == "tp" or layout.gpus == 1:
        return 0
    fp8 = layout.weights_dtype.startswith("float8")
    most = min(layout.max_tokens_per_rank, EngineConfig.max_dispatch_tokens)
    sizes = {most, min(most, LOW_LATENCY_TOKENS)}
    H, K = spec.hidden_size, spec.moe.top_k
    return sum(Staging(layout.gpus, T, H, K, _ACTIVATION_BYTES, fp8).nbytes for T in sizes)


def staging_bytes(spec: ModelSpec, layout: Layout) -> int:
    """A place for each of a GPU's slots in one layer, as engines have that move experts while they
    serve. None without EP."""
    if layout.experts == "tp" or layout.gpus == 1:
        return 0
    one = matrix_bytes(spec, spec.expert_params, layout.weights_dtype)
    return slots_per_rank(spec, layout) * one


def received_rows(spec: ModelSpec, layout: Layout) -> float:
    """Mean rows that reach a GPU in a step at even load: a token once per rank it needs."""
    ranks, k = layout.gpus, spec.moe.top_k
    return layout.max_tokens_per_rank * ranks * (1 - (1 - 1 / ranks) ** k)


def activation_bytes(spec: ModelSpec, layout: Layout, workload: Workload) -> int:
    """The largest of a layer's parts at full step, beside the residual stream, its norm, and the
    logits of the rows that are sampled."""
    T, H = layout.max_tokens_per_rank, spec.hidden_size
    stream = 2 * T * H
    attention = _attention_values(spec, layout, workload)
    tp = layout.tp if layout.experts == "tp" else 1
    dense = 3 * T * (spec.intermediate_size if len(spec.moe_layers) < spec.num_layers else 0) // tp
    rows = T if layout.experts == "tp" else received_rows(spec, layout) * RECEIVED_HEADROOM
    moe = (rows + 2 * T) * H + 3 * T * spec.moe.shared_intermediate_size // tp
    sampled = {"decode": T, "prefill": -(-T // workload.isl), "both": min(T, SAMPLED_ROWS)}
    logits = sampled[layout.role] * -(-spec.vocab_size // layout.tp) * DTYPE_BYTES["float32"]
    return int(_ACTIVATION_BYTES * (stream + max(attention, dense, moe))) + logits


def _attention_values(spec: ModelSpec, layout: Layout, workload: Workload) -> int:
    """Queries, outputs and, in prefill, one sequence's expanded keys and values."""
    a, T = spec.attention, layout.max_tokens_per_rank * layout.tp
    heads = -(-a.num_heads // layout.tp)
    if isinstance(a, GQASpec):
        return T * a.head_dim * 2 * (heads + _kv_heads(a, layout.tp))
    qk = a.qk_nope_head_dim + a.qk_rope_head_dim
    down = T * (a.kv_width + (a.q_lora_rank or 0))
    if layout.role == "decode":
        return down + T * heads * (qk + a.kv_width + a.kv_lora_rank + a.v_head_dim)
    seen = workload.isl * heads * (a.qk_nope_head_dim + a.v_head_dim + 2 * qk)
    return down + T * heads * (2 * qk + a.v_head_dim) + seen


def plan_memory(
    spec: ModelSpec,
    hardware: Hardware,
    layout: Layout,
    workload: Workload,
    *,
    memory_share: float = MEMORY_SHARE,
    whole_vocab: bool = False,
) -> MemoryPlan:
    """`memory_share`: of the GPU's memory that may be filled. `whole_vocab`: embeddings and LM head
    are on every rank of a group. Never raises for what does not fit: the plan says so."""
    return MemoryPlan(
        hardware=hardware.name,
        layout=layout,
        memory_bytes=hardware.memory_bytes,
        budget_bytes=int(hardware.memory_bytes * memory_share),
        weights=rank_weights(spec, layout, whole_vocab),
        transport=transport_bytes(spec, layout),
        staging=staging_bytes(spec, layout),
        activations=activation_bytes(spec, layout, workload),
        workspaces=EXPERT_WORKSPACE_BYTES + LIBRARY_BYTES,
        graphs=0 if layout.role == "prefill" else GRAPH_BYTES,
        kv_bytes_per_token=kv_bytes_per_token(spec, layout.kv_dtype, layout.tp),
        length=workload.isl + (0 if layout.role == "prefill" else workload.osl),
    )


@dataclass(frozen=True)
class SmallestEP:
    """`quotient`: expert bytes over the memory left for them per GPU, at `ranks`. `ranks`: the
    smallest number that holds whole experts, `even` the smallest that also divides their number;
    None where no number up to the experts' does."""

    quotient: float
    ranks: int | None
    even: int | None
    lines: tuple[str, ...]


def smallest_ep(
    spec: ModelSpec,
    hardware: Hardware,
    layout: Layout,
    workload: Workload,
    *,
    memory_share: float = MEMORY_SHARE,
) -> SmallestEP:
    """The smallest number of GPUs over which the experts fit with one request's KV; `layout` gives
    all but that number."""
    plans = {
        ranks: plan_memory(
            spec, hardware, replace(layout, gpus=ranks), workload, memory_share=memory_share
        )
        for ranks in range(layout.tp, spec.moe.num_experts + 1, layout.tp)
    }
    fitting = [ranks for ranks, plan in plans.items() if plan.fits]
    even = [ranks for ranks in fitting if spec.moe.num_experts % ranks == 0]
    ranks = fitting[0] if fitting else None
    plan = plans[ranks or min(plans, key=lambda r: plans[r].short_bytes)]
    experts = spec.moe.num_experts * expert_bytes(spec, layout.weights_dtype)
    redundant = layout.redundant_per_rank * expert_bytes(spec, layout.weights_dtype)
    kv = plan.length * plan.kv_bytes_per_token
    other = plan.used_bytes - plan.weights.experts + redundant + kv
    left = plan.budget_bytes - other
    quotient = experts / left if left > 0 else math.inf
    return SmallestEP(
        quotient,
        ranks,
        even[0] if even else None,
        tuple(_ep_lines(spec, plan, experts, kv, redundant, left, quotient, even)),
    )


def _ep_lines(
    spec: ModelSpec,
    plan: MemoryPlan,
    experts: int,
    kv: int,
    redundant: int,
    left: int,
    quotient: float,
    even: list[int],
) -> list[str]:
    gb = 1e9
    others = {name: n for name, n in plan.parts().items() if name != "experts"}
    others |= {"one request's KV": kv} | ({"redundant experts": redundant} if redundant else {})
    params = spec.moe.num_experts * spec.expert_params * len(spec.moe_layers)
    lines = [
        f"routed experts: {len(spec.moe_layers)} layers x {spec.moe.num_experts} x "
        f"{spec.expert_params:,} = {params / 1e9:.1f}e9 parameters = {experts / gb:,.1f} GB in "
        f"{plan.layout.weights_dtype}",
        f"memory left per GPU (EP{plan.layout.gpus}): {plan.budget_bytes / gb:.2f} - "
        + " - ".join(f"{n / gb:.2f} ({name})" for name, n in others.items())
        + f" = {left / gb:.2f} GB",
    ]
    if left <= 0:
        return [*lines, f"EP: none; memory is short by {-left / gb:.2f} GB before any expert"]
    lines.append(f"EP: {experts / gb:,.1f} / {left / gb:.2f} = {quotient:.2f}")
    if not plan.fits:
        return [
            *lines,
            f"EP: none up to {spec.moe.num_experts} GPUs; nearest is {plan.layout.gpus}: "
            f"{plan.short}",
        ]
    slots = slots_per_rank(spec, plan.layout)
    lines.append(f"smallest: {plan.layout.gpus} GPUs with {slots} slots each")
    if even:
        lines.append(
            f"smallest that divides {spec.moe.num_experts} experts: {even[0]} GPUs with "
            f"{spec.moe.num_experts // even[0]} each"
        )
    return lines
