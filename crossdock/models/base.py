"""A decoder-only MoE transformer, assembled from a `ModelSpec`. Knows no model by name."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.comm import Board
from crossdock.core import (
    KV,
    ForwardBatch,
    Group,
    ModelSpec,
    OverlapMode,
    Placement,
    SlotLayer,
    Transport,
    shard_attention,
    share_of,
)
from crossdock.core.batch import CapturedStep
from crossdock.core.staging import padded
from crossdock.layers import (
    Attention,
    AttentionBackend,
    AttentionName,
    DenseMLP,
    Products,
    RMSNorm,
    Rope,
    SoloGroup,
    choose_attention,
    choose_products,
)
from crossdock.layers.attention import AttentionCase, LaysOut, Planner
from crossdock.metrics import Recorder
from crossdock.models.weights import (
    LoadAttention,
    Loader,
    WeightSource,
    load_experts,
    load_mlp,
    score_scale,
)
from crossdock.moe import MoEContext, RouterOptions, build_moe_layer
from crossdock.moe.padded import PaddedMoELayer, padded_shared


@dataclass(frozen=True, eq=False)
class ModelContext:
    """What a model is built into: this rank and its surroundings."""

    rank: int
    device: torch.device
    dtype: torch.dtype
    invariant: bool
    placement: Placement
    transport: Transport
    recorder: Recorder
    max_model_len: int
    """Positions the rotary tables hold."""
    board: Board = field(default_factory=lambda: Board(0, 1))
    """Where the layers say which stage they are in."""
    expert_workspace: int = 256 << 20
    """Bytes that the experts of a layer may hold at once."""
    fp8_experts: Literal["triton", "deepgemm"] = "triton"
    fp8: bool = False
    """Products and experts in FP8; see `Loader`. The transport's hidden size is then padded."""
    routing: str = "real"
    router: RouterOptions = field(default_factory=RouterOptions)
    attention: AttentionName = "torch"
    fp8_cache: bool = False
    apart: Transport | None = None
    """What is used where work is put between begin and end; None: `transport`."""
    group: Group = field(default_factory=SoloGroup)
    """The ranks over which attention and dense layers are split."""


@dataclass(frozen=True)
class Family:
    """How an architecture's checkpoint names its parts. `blocks`: names of the MoE block, the first
    that the checkpoint has is taken; `experts`: of gate, up and down."""

    load_attention: LoadAttention
    blocks: tuple[str, ...] = ("mlp",)
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    correction_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


class MoEBlock(SlotLayer, Protocol):
    def forward(
        self,
        x_TH: Tensor,
        keys_T: Tensor,
        most_tokens: int | None = None,
        overlap: OverlapMode = "sbo",
        rows_1: Tensor | None = None,
    ) -> Generator[None, None, Tensor]: ...


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """After the attention comes either `moe` or `mlp`."""

    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    moe: MoEBlock | None = None
    mlp: DenseMLP | None = None


class Decoder:
    """`core.Model`."""

    def __init__(
        self,
        embedding_VH: Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head_VH: Tensor,
        attention: AttentionBackend,
        planner: Planner,
        products: Products,
        recorder: Recorder,
        board: Board,
        weight_bytes: int,
        group: Group,
    ):
        self.board, self.weight_bytes, self.group = board, weight_bytes, group
        self.embedding_VH, self.layers, self.norm, self.head_VH = (
            embedding_VH,
            layers,
            norm,
            head_VH,
        )
        self.planner, self.products, self.recorder = planner, products, recorder
        self.attention = attention
        self.moe_layers: Sequence[SlotLayer] = [layer.moe for layer in layers if layer.moe]

    def forward(self, batch: ForwardBatch, kv: KV) -> Generator[None, None, Tensor]:
        """[T, H] after the last norm. Between layers a rank carries its share of the tokens, t of
        T, which with a group of one are all. A group without tokens runs the MoE layers alone, and
        so does a rank with an empty share, beside its part of attention and dense layers."""
        group, T = self.group, batch.num_tokens
        own = share_of(T, group.size, group.rank)
        x_tH, keys_t = F.embedding(batch.tokens_T[own], self.embedding_VH), batch.keys_T[own]
        most = None if batch.most_tokens is None else -(-batch.most_tokens // group.size)
        rows_1 = batch.rows_1
        if rows_1 is not None and own.start:
            rows_1 = rows_1 - own.start
        plan = self.planner(batch, kv.page_size) if T else None
        y_tH: Tensor | None = None  # of the block before; added in the pass that norms
        for i, layer in enumerate(self.layers):
            if plan is not None:
                self.board.enter("attention")
                with self.recorder.span("attention"):
                    h_tH, x_tH = _add_norm(layer.attention_norm, y_tH, x_tH)
                    y_tH = layer.attention(group.all_gather(h_tH, T), kv.layer(i), plan)
            if layer.moe is not None:
                h_tH = x_tH
                if plan is not None:
                    with self.recorder.span("norm"):
                        h_tH, x_tH = _add_norm(layer.ffn_norm, y_tH, x_tH)
                y_tH = yield from layer.moe.forward(h_tH, keys_t, most, batch.overlap, rows_1)
            elif layer.mlp is not None and plan is not None:
                with self.recorder.span("dense"):
                    h_tH, x_tH = _add_norm(layer.ffn_norm, y_tH, x_tH)
                    y_tH = layer.mlp(group.all_gather(h_tH, T))
        return group.all_gather(_add_norm(self.norm, y_tH, x_tH)[0], T) if T else x_tH

    def lay_out(self, step: CapturedStep) -> None:
        if isinstance(self.planner, LaysOut):
            self.planner.lay_out(step)

    def logits(self, hidden_BH: Tensor, out_BV: Tensor | None = None) -> Tensor:
        return self.products.logits(hidden_BH, self.head_VH, out_BV)


def _add_norm(norm: RMSNorm, y_tH: Tensor | None, x_tH: Tensor) -> tuple[Tensor, Tensor]:
    """`(norm(sum), sum)` of `sum = x + y`."""
    return (norm(x_tH), x_tH) if y_tH is None else norm.add(y_tH, x_tH)


def build_decoder(
    spec: ModelSpec, family: Family, source: WeightSource, context: ModelContext
) -> Decoder:
    products = choose_products(context.invariant, context.device, context.dtype, context.fp8)
    heads = shard_attention(spec.attention, context.group.size)
    attention = choose_attention(
        context.attention,
        context.device,
        context.dtype,
        context.invariant,
        AttentionCase(heads, score_scale(spec), context.fp8_cache),
    )
    load = Loader(
        spec, source, products, context.group, context.dtype, context.device, attention,
        context.fp8,
    )  # fmt: skip
    moe_context = MoEContext(
        rank=context.rank,
        placement=context.placement,
        transport=context.transport,
        recorder=context.recorder,
        matmul=products.matmul,
        invariant=context.invariant,
        device=context.device,
        dtype=context.dtype,
        board=context.board,
        workspace=context.expert_workspace,
        fp8_experts=context.fp8_experts,
        routing=context.routing,
        router=context.router,
        apart=context.apart,
    )
    V, H = spec.vocab_size, spec.hidden_size
    embedding_VH = load.get("model.embed_tokens.weight", (V, H))
    tied = spec.tie_word_embeddings
    rope = Rope(spec.rope, context.max_model_len, context.dtype, context.device)
    return Decoder(
        embedding_VH=embedding_VH,
        layers=[_layer(load, family, moe_context, i) for i in range(spec.num_layers)],
        norm=load.norm("model.norm"),
        head_VH=products.pack(embedding_VH if tied else load.get("lm_head.weight", (V, H))),
        attention=attention,
        planner=attention.planner(heads, rope),
        products=products,
        recorder=context.recorder,
        board=context.board,
        weight_bytes=load.held.nbytes,  # after all that loads
        group=context.group,
    )


def _layer(load: Loader, family: Family, context: MoEContext, index: int) -> DecoderLayer:
    spec, at = load.spec, f"model.layers.{index}"
    routed = index in spec.moe_layers
    return DecoderLayer(
        attention_norm=load.norm(f"{at}.input_layernorm"),
        attention=family.load_attention(load, f"{at}.self_attn"),
        ffn_norm=load.norm(f"{at}.post_attention_layernorm"),
        moe=_moe_block(load, family, context, index) if routed else None,
        mlp=None if routed else load_mlp(load, f"{at}.mlp", spec.intermediate_size),
    )


def _moe_block(load: Loader, family: Family, context: MoEContext, index: int) -> MoEBlock:
    moe, names = load.spec.moe, [f"model.layers.{index}.{block}" for block in family.blocks]
    # None there: the error of the first tensor that is asked for says so.
    at = next((name for name in names if load.source.has(f"{name}.gate.weight")), names[0])
    ordinal = load.spec.moe_layers.index(index)
    experts = context.placement.local_slots(ordinal, context.rank).tolist()
    weights = load_experts(load, at, family.experts, experts, family.correction_bias)
    shared: Callable[[Tensor], Tensor] | None = None
    if moe.shared_intermediate_size:
        # Whole on every rank: it sees the rank's share of the tokens, and nothing is reduced.
        whole = replace(load, group=SoloGroup())
        shared = load_mlp(whole, f"{at}.{family.shared}", moe.shared_intermediate_size)
    if not load.fp8:
        return build_moe_layer(moe, ordinal, weights, shared, context)
    H, wide = load.spec.hidden_size, padded(load.spec.hidden_size)
    moe = replace(moe, intermediate_size=padded(moe.intermediate_size))
    if wide == H:
        return build_moe_layer(moe, ordinal, weights, shared, context)
    if shared is not None:
        shared = padded_shared(shared, H, wide)
    return PaddedMoELayer(build_moe_layer(moe, ordinal, weights, shared, context), H, wide)
