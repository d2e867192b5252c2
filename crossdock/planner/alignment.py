"""What tensor parallelism does to shapes: shards, padding, waste, and what cannot run."""

import math
from dataclasses import dataclass
from typing import Literal

from crossdock.core import GQASpec, ModelSpec

TILE = 128
"""Rows or columns that a matrix kernel works on at once, and the side of an FP8 block."""

Kind = Literal["matrix", "heads", "vocabulary"]


@dataclass(frozen=True)
class Shard:
    """One dimension of `full` over `tp` ranks. `size`: the largest rank's share; `padded`: what it
    is filled up to; `wasted`: share of the padded sizes of all ranks that holds nothing. `problem`:
    why it is not runnable, or empty. `replicas`: ranks that hold the same KV heads."""

    name: str
    kind: Kind
    full: int
    tp: int
    size: int
    padded: int
    problem: str = ""
    replicas: int = 1

    @property
    def wasted(self) -> float:
        return max(0.0, 1 - self.full / (self.padded * self.tp)) if self.replicas == 1 else 0.0

    @property
    def aligned(self) -> bool:
        return self.padded == self.size and self.full % self.tp == 0

    @property
    def runnable(self) -> bool:
        return not self.problem

    @property
    def satisfied(self) -> bool:
        """Runs without padding; the vocabulary may be padded, its waste is the last rows' alone."""
        return self.runnable and (self.aligned or self.kind == "vocabulary" or self.replicas > 1)

    def line(self) -> str:
        text = f"{self.name}: {self.full:,} / TP{self.tp} = {self.size:,}"
        if self.padded != self.size:
            text += f", padded to {self.padded:,}, {self.wasted:.1%} wasted"
        elif self.kind != "heads" and self.tp > 1:
            text += f", a multiple of {TILE}"
        if self.replicas > 1:
            text += f", each held by {self.replicas} ranks"
        return f"{text}; not runnable: {self.problem}" if self.problem else text


def shards(
    spec: ModelSpec,
    tp: int,
    weights_dtype: str = "bfloat16",
    experts: Literal["ep", "tp"] = "tp",
) -> list[Shard]:
    """Every dimension that `tp` ranks divide: attention by heads, embedding and LM head by the
    vocabulary, and where experts lie by TP, they and the dense layers by their width."""
    block = fp8_block(spec, weights_dtype)
    widths = {}
    if experts == "tp":
        if len(spec.moe_layers) < spec.num_layers:
            widths["dense width"] = spec.intermediate_size
        widths["expert width"] = spec.moe.intermediate_size
        if spec.moe.shared_intermediate_size:
            widths["shared expert width"] = spec.moe.shared_intermediate_size
    found = [_matrix(name, width, tp, block) for name, width in widths.items()]
    found += _heads(spec, tp, block)
    size = -(-spec.vocab_size // tp)
    padded = _padded(size) if tp > 1 else size
    return [*found, Shard("vocabulary", "vocabulary", spec.vocab_size, tp, size, padded)]


def shards_of_tp(spec: ModelSpec, tp: int, weights_dtype: str = "bfloat16") -> list[Shard]:
    """What crossdock's own `tp` divides: attention by heads, dense layers by their width."""
    block = fp8_block(spec, weights_dtype)
    dense = []
    if len(spec.moe_layers) < spec.num_layers:
        dense = [_matrix("dense width", spec.intermediate_size, tp, block)]
    return [*dense, *_heads(spec, tp, block)]


def fp8_block(spec: ModelSpec, weights_dtype: str) -> int | None:
    """Side of the blocks that share a scale; None where weights have none."""
    if not weights_dtype.startswith("float8"):
        return None
    return spec.quant.block[0] if spec.quant else TILE


def _padded(size: int) -> int:
    return -(-size // TILE) * TILE


def _matrix(name: str, full: int, tp: int, block: int | None) -> Shard:
    size, problem = -(-full // tp), ""
    if tp == 1:  # whole, as the checkpoint has it
        return Shard(name, "matrix", full, 1, full, full)
    if block is not None and (full % tp or size % block):
        problem = f"a shard of {full / tp:,.6g} cuts an FP8 block of {block}"
    elif full % tp:
        problem = f"{tp} does not divide {full:,}"
    return Shard(name, "matrix", full, tp, size, _padded(size), problem)


def _heads(spec: ModelSpec, tp: int, block: int | None) -> list[Shard]:
    a = spec.attention
    size = -(-a.num_heads // tp)
    problem = f"{tp} does not divide {a.num_heads} heads" if a.num_heads % tp else ""
    heads = Shard("attention heads", "heads", a.num_heads, tp, size, size, problem)
    if not isinstance(a, GQASpec):
        widths = {
            "query up-projection": a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim),
            "KV up-projection": a.num_heads * (a.qk_nope_head_dim + a.v_head_dim),
            "output projection": a.num_heads * a.v_head_dim,
        }
        return [heads, *(_matrix(name, width, tp, block) for name, width in widths.items())]
    kv, size = a.num_kv_heads, max(1, -(-a.num_kv_heads // tp))
    problem = f"{tp} neither divides {kv} KV heads nor is a multiple of them"
    kv_heads = Shard(
        "KV heads",
        "heads",
        kv,
        tp,
        size,
        size,
        problem if kv % tp and tp % kv else "",
        replicas=max(1, tp // kv),
    )
    query = _matrix("query projection", a.num_heads * a.head_dim, tp, block)
    return [heads, kv_heads, query]


def aligned_tp_sizes(
    spec: ModelSpec,
    weights_dtype: str = "bfloat16",
    experts: Literal["ep", "tp"] = "tp",
    most: int = 64,
) -> list[int]:
    """TP sizes up to `most` that run without padding anywhere but in the vocabulary."""
    return [
        tp
        for tp in range(1, most + 1)
        if all(shard.satisfied for shard in shards(spec, tp, weights_dtype, experts))
    ]


def dense_memory(spec: ModelSpec, tp: int, tokens_per_gpu: int, graphs: int) -> float:
    """Values that a dense layer holds on a GPU: its parameters over `tp`, and hidden states of the
    `tp` GPUs' tokens, `graphs` further times where decode graphs keep buffers of their own.

    N_param / TP + (1 + k) N_hidden TP, LMSYS, "Deploying DeepSeek with PD disaggregation and
    large-scale expert parallelism on 96 H100 GPUs" (2025-05); N_hidden: tokens x width.
    """
    return _dense_params(spec) / tp + (1 + graphs) * _dense_hidden(spec, tokens_per_gpu) * tp


def dense_tp_optimum(spec: ModelSpec, tokens_per_gpu: int, graphs: int) -> float:
    """Where `dense_memory` is least: sqrt(N_param / ((1 + k) N_hidden))."""
    return math.sqrt(_dense_params(spec) / ((1 + graphs) * _dense_hidden(spec, tokens_per_gpu)))


def _dense_params(spec: ModelSpec) -> int:
    return 3 * spec.hidden_size * spec.intermediate_size


def _dense_hidden(spec: ModelSpec, tokens: int) -> int:
    return tokens * spec.intermediate_size


@dataclass(frozen=True)
class DenseAdvice:
    """How to divide the dense layers over groups of `tp` ranks: `best` of the sizes that run
    unpadded and divide `tp`; 1 is data parallel."""

    tp: int
    best: int
    optimum: float
    lines: tuple[str, ...]


def advise_dense(
    spec: ModelSpec,
    tp: int,
    tokens_per_gpu: int,
    *,
    graphs: int,
    weights_dtype: str = "bfloat16",
) -> DenseAdvice:
    """`graphs`: k of the formula, 0 in prefill and 3 in decode as published.

    Raises:
        ValueError: the model has no dense layers.
    """
    if len(spec.moe_layers) == spec.num_layers:
        raise ValueError("the model has no dense layers")
    block = fp8_block(spec, weights_dtype)
    width = spec.intermediate_size
    candidates = [
        size
        for size in range(1, tp + 1)
        if tp % size == 0 and _matrix("dense width", width, size, block).satisfied
    ]
    memory = {size: dense_memory(spec, size, tokens_per_gpu, graphs) for size in (*candidates, tp)}
    best = min(candidates, key=memory.__getitem__)
    optimum = dense_tp_optimum(spec, tokens_per_gpu, graphs)
    hidden = _dense_hidden(spec, tokens_per_gpu)
    lines = [
        f"least memory at TP = sqrt({_dense_params(spec):,} / ({1 + graphs} x {hidden:,})) = "
        f"{optimum:.2f}",
        *(f"TP{size}: {memory[size] / 1e6:,.1f}e6 values" for size in sorted(memory)),
        f"dense layers: TP{best}" + (" (data parallel)" if best == 1 else ""),
        _matrix("dense width", width, tp, block).line(),
    ]
    return DenseAdvice(tp, best, optimum, tuple(lines))
