"""Seconds of one step of a role, part by part: products and attention as a roofline, exchanges over
hierarchical links, and what their overlap hides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from crossdock.core import ConfigError, MLASpec, ModelSpec
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.cost.explain import explain
from crossdock.planner.cost.network import all_reduce_s, exchange_s, outer_of, spread
from crossdock.planner.cost.terms import Product, rounded
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Phase

FP8 = "float8_e4m3fn"
BYTES: Mapping[str, float] = {**DTYPE_BYTES, "nvfp4": 0.5 + 1 / 16}
"""Of a stored weight; NVFP4 with one FP8 scale for 16 values."""
FP8_ROW = 1 + 4 / 128
"""Bytes of an element of a row that travels as FP8: with an fp32 scale for 128 of them."""
COMMUNICATION = ("dispatch", "combine", "all_reduce")
MLA_TILE = 64
"""Rows (heads) of a tile of absorbed MLA decode: fewer heads on a rank leave it part empty."""


@dataclass(frozen=True)
class StepCost:
    """`parts`: seconds of one step by part, summed over layers (with two-batch overlap, over both
    halves). `total` = sum of parts - `hidden`."""

    parts: Mapping[str, float]
    hidden: float
    model: "StepModel" = field(repr=False, compare=False)
    tokens: float
    context: float
    imbalance: float

    @property
    def total(self) -> float:
        return sum(self.parts.values()) - self.hidden

    @property
    def communication(self) -> float:
        return sum(self.parts[name] for name in COMMUNICATION)

    @property
    def exposed_communication(self) -> float:
        return self.communication - self.hidden

    @property
    def explain(self) -> tuple[str, ...]:
        """Each formula with its numbers, a line each."""
        return self.model.explain(self.tokens, self.context, self.imbalance)


def step_cost(
    spec: ModelSpec,
    hardware: Hardware,
    layout: Layout,
    phase: Phase,
    *,
    tokens_per_gpu: float,
    context: float,
    imbalance: float = 1.0,
) -> StepCost:
    """One step of every GPU of `layout`; for many calls on one layout keep a `StepModel`.

    Args:
        tokens_per_gpu: tokens of the step over all GPUs, divided by the GPUs (with `tp` a group
            runs tp times as many together). In decode a token is a sequence.
        context: cached tokens that a token attends to, in the mean; of whole prompts half their
            length.
        imbalance: rows of the busiest rank over the mean rank's, at least 1.

    Raises:
        ConfigError: the layout does not suit the hardware (see `StepModel`).
    """
    return StepModel(spec, hardware, layout, phase).cost(tokens_per_gpu, context, imbalance)


class StepModel:
    """A layout's step, its constants worked out once. Pure arithmetic, some 6 us a call.

    Attention and dense parts are data parallel over the groups; within a group of `tp` GPUs heads
    are sharded and activations all-reduced. Routed experts lie over all GPUs ("ep") or are sharded
    in each group ("tp"), and then every rank computes all rows of its group on its share of F.

    Raises:
        ConfigError: tp does not divide the GPUs, a dtype is unknown, or the layout spans several
            nodes of a GPU that has no network.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        layout: Layout,
        phase: Phase,
        calibration: Calibration = DEFAULT,
    ):
        _check(hardware, layout)
        self.spec, self.hardware, self.layout, self.phase = spec, hardware, layout, phase
        self.calibration = calibration
        self.ep = layout.experts == "ep"
        moe, h, dtype = spec.moe, spec.hidden_size, layout.weights_dtype
        n_moe = len(spec.moe_layers)
        sharded = 1 if self.ep else layout.tp
        # 4-bit checkpoints keep attention in 8 bits; the vocabulary stays in 16 everywhere.
        attention_dtype = FP8 if dtype == "nvfp4" else dtype
        attention = spec.attention.params(h)
        ffn = 3 * h

        def product(name: str, count: int, params: float, shards: int, dtype: str) -> Product:
            width = BYTES[dtype]
            return Product(
                name,
                count,
                2.0 * params,
                params * width / shards,
                2.0 * h,
                compute_rate(hardware, dtype) * calibration.sustained_share,
                hardware.memory_bytes_per_s,
                calibration.roofline_power,
            )

        self.projections = product(
            "attention_projections", spec.num_layers, attention, layout.tp, attention_dtype
        )
        self.router = product("router", n_moe, h * moe.num_experts, 1, "bfloat16")
        shared = ffn * moe.shared_intermediate_size
        self.shared = product("shared_expert", n_moe if shared else 0, shared, sharded, dtype)
        self.dense = product(
            "dense", spec.num_layers - n_moe, ffn * spec.intermediate_size, sharded, dtype
        )
        self.head = product("lm_head", 1, spec.vocab_size * h, layout.tp, "bfloat16")
        self._init_experts(product, n_moe, dtype)
        self._init_attention()
        self._init_exchange()
        if not self.ep:
            self.reduces_per_layer = 2
        else:
            self.reduces_per_layer = 1 if layout.tp > 1 else 0
        self.overhead_s = spec.num_layers * calibration.layer_overhead_s
        self.elementwise_s = (
            spec.num_layers * calibration.elementwise_passes * 2.0 * h / hardware.memory_bytes_per_s
        )

    def _init_experts(self, product: Callable[..., Product], n_moe: int, dtype: str) -> None:
        spec, layout = self.spec, self.layout
        moe = spec.moe
        if self.ep:
            self.slots = -(-moe.num_experts // layout.gpus) + layout.redundant_per_rank
            self.ranks, shards = layout.gpus, 1
        else:
            self.slots, self.ranks, shards = moe.num_experts, 1, layout.tp
        one = product("experts", n_moe, spec.expert_params, shards, dtype)
        width = BYTES[dtype]
        rows = spec.hidden_size * (width + 2) + moe.intermediate_size / shards * (4 + 2 * width)
        self.experts = Product(
            "experts",
            n_moe,
            one.flops_per_row / shards,
            one.weight_bytes * self.slots,
            rows,
            one.flops_per_s,
            one.bytes_per_s,
            one.power,
        )
        # A group's rows are computed by each of its ranks, on its share.
        self.rows_per_token = moe.top_k * shards
        self.tokens_together = layout.gpus if self.ep else layout.tp
        self.slot_share = moe.top_k / (self.slots * self.ranks)

    def _init_attention(self) -> None:
        spec, layout, hardware = self.spec, self.layout, self.hardware
        attention = spec.attention
        rate = compute_rate(hardware, layout.kv_dtype if layout.kv_dtype == FP8 else "bfloat16")
        flops = float(attention.flops(1))
        read = attention.kv_width * BYTES[layout.kv_dtype]
        if isinstance(attention, MLASpec):
            read *= layout.tp  # the latent is not sharded: every rank reads its group's
            if self.phase == "prefill":
                qk = attention.qk_nope_head_dim + attention.qk_rope_head_dim
                flops = 2.0 * attention.num_heads * (qk + attention.v_head_dim)
            else:
                heads = attention.num_heads / layout.tp
                flops *= -(-heads // MLA_TILE) * MLA_TILE / heads
        else:
            read *= layout.tp / min(layout.tp, attention.num_kv_heads)
        window = None if isinstance(attention, MLASpec) else attention.sliding_window
        self.window = float("inf") if window is None else float(window)
        efficiency = self.calibration.attention_efficiency * self.calibration.sustained_share
        self.kv_flop_s = flops / (rate * efficiency)
        # Whole prompts are read once per tile of 128 queries.
        self.kv_read_s = (
            read / hardware.memory_bytes_per_s / (128 if self.phase == "prefill" else 1)
        )

    def _init_exchange(self) -> None:
        spec, layout = self.spec, self.layout
        h = spec.hidden_size
        narrow = layout.weights_dtype in (FP8, "nvfp4")
        self.dispatch_row = h * (FP8_ROW if narrow else 2.0)
        self.combine_row = h * 2.0
        gpus = layout.gpus if self.ep else 1
        self.spread = spread(
            spec.moe, gpus, self.hardware.domain_size, layout.mode, layout.redundant_per_rank > 0
        )

    def expert_rows(self, tokens: float, imbalance: float) -> tuple[float, float, float]:
        """`(rows, padded, active)` of the busiest GPU: rows, rows with their tiles' rests, and the
        share of its slots that got any."""
        rows = tokens * self.rows_per_token * imbalance
        active = 1.0 - (1.0 - self.slot_share) ** (tokens * self.tokens_together)
        used = max(active * self.slots, 1e-9)
        tile = self.calibration.expert_tile
        padded = used * max(tile, rows / used + tile / 2)
        return rows, padded, active

    def parts(self, tokens: float, context: float, imbalance: float) -> dict[str, float]:
        """Seconds of one batch of `tokens` per GPU, nothing overlapped, without the step's own."""
        layers, n_moe = self.spec.num_layers, len(self.spec.moe_layers)
        attended = tokens * min(context, self.window)
        sampled = tokens if self.phase == "decode" else tokens / max(2.0 * context, 1.0)
        rows, padded, active = self.expert_rows(tokens, imbalance)
        reduced = self.reduces_per_layer and all_reduce_s(
            tokens * self.layout.tp * self.combine_row, self.layout.tp, self.hardware
        )
        return {
            "attention_projections": self.projections.seconds(tokens),
            "attention_kv": layers
            * rounded(
                attended * self.kv_flop_s,
                attended * self.kv_read_s,
                self.calibration.roofline_power,
            ),
            "router": self.router.seconds(tokens),
            "dispatch": n_moe * self._exchange(self.dispatch_row, tokens, imbalance),
            "experts": self.experts.seconds(rows, padded, active),
            "combine": n_moe * self._exchange(self.combine_row, tokens, imbalance),
            "shared_expert": self.shared.seconds(tokens),
            "dense": self.dense.seconds(tokens),
            "lm_head": self.head.seconds(sampled),
            "all_reduce": layers * self.reduces_per_layer * reduced,
            "small_kernels": self.overhead_s + tokens * self.elementwise_s,
        }

    def _exchange(self, row_bytes: float, tokens: float, imbalance: float) -> float:
        if self.spread.ranks == 1:
            return 0.0
        seconds = exchange_s(
            self.spread,
            self.hardware,
            self.layout.mode,
            row_bytes,
            tokens,
            self.calibration,
            imbalance,
        )
        return seconds + (
            self.calibration.normal_overhead_s if self.layout.mode == "normal" else 0.0
        )

    def cost(self, tokens: float, context: float, imbalance: float = 1.0) -> StepCost:
        """`tokens` per GPU; see `step_cost`."""
        if self.layout.overlap == "tbo":
            half = self.parts(tokens / 2, context, imbalance)
            parts = {name: 2 * seconds for name, seconds in half.items()}
        else:
            parts = self.parts(tokens, context, imbalance)
        hidden = self.hidden(parts)
        parts["step"] = self.calibration.step_overhead_s
        return StepCost(parts, hidden, self, tokens, context, imbalance)

    def seconds(self, tokens: float, context: float, imbalance: float = 1.0) -> float:
        """`cost(...).total`."""
        return self.cost(tokens, context, imbalance).total

    def hidden(self, parts: Mapping[str, float]) -> float:
        """Seconds of communication that run beside products.

        SBO: the shared expert beside dispatch, the experts' second product (a third) beside
        combine.
        TBO: one half computes while the other communicates; a period is no shorter than the
        products of both, the exchanges of both, or one half's own chain. Products beside normal
        mode have fewer multiprocessors. Low-latency stores over NVLink are made by multiprocessors
        that wait for nobody (DeepEP PR 173), so there is nothing to hide.
        """
        exchanges = parts["dispatch"] + parts["combine"]
        efficiency = self.calibration.overlap_efficiency
        if self.layout.overlap == "off" or exchanges == 0.0:
            return 0.0
        if self.layout.overlap == "sbo":
            shared = min(parts["shared_expert"], parts["dispatch"])
            return efficiency * (shared + min(parts["experts"] / 3, parts["combine"]))
        if self.layout.mode == "low_latency" and self.spread.nodes == 1:
            return 0.0
        products = sum(parts.values()) - exchanges
        slowed = 0.0
        if self.layout.mode == "normal":
            share = self.calibration.comm_sms_share
            slowed = share / (1 - share) * min(products, exchanges)
        period = max(products + slowed, exchanges, (products + exchanges) / 2)
        return max(0.0, efficiency * (products + exchanges - period))

    def explain(self, tokens: float, context: float, imbalance: float = 1.0) -> tuple[str, ...]:
        """Each formula with its numbers, a line each."""
        return explain(self, tokens, context, imbalance)


_COMPUTED_AS = {
    "nvfp4": ("nvfp4", FP8, "bfloat16"),
    FP8: (FP8, "bfloat16"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float32": ("float32",),
}
"""What products of weights of a dtype run in: the first that the GPU multiplies."""


def compute_rate(hardware: Hardware, dtype: str) -> float:
    """Operations per second of products whose weights are `dtype`; where the GPU cannot multiply
    it, they are widened first. Raises ConfigError where the description gives no such rate."""
    for name in _COMPUTED_AS[dtype]:
        if name in hardware.flops:
            return hardware.flops[name]
    raise ConfigError(
        f"{hardware.name} has no rate of products for {dtype} weights; its description gives "
        f"{', '.join(hardware.flops)}, expected one of {', '.join(_COMPUTED_AS[dtype])}"
    )


def _check(hardware: Hardware, layout: Layout) -> None:
    for name in (layout.weights_dtype, layout.kv_dtype):
        if name not in BYTES:
            raise ConfigError(f"dtype {name!r} is unknown; known: {', '.join(BYTES)}")
    if layout.gpus % layout.tp:
        raise ConfigError(f"tp {layout.tp} does not divide {layout.gpus} GPUs")
    widest = layout.gpus if layout.experts == "ep" else layout.tp
    if widest > hardware.domain_size:
        outer_of(hardware)
