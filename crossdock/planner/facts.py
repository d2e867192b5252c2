"""What a model is in numbers, beside a dense one of the same active size."""

from dataclasses import dataclass, fields

from crossdock.core import ModelSpec
from crossdock.planner.memory import (
    Weights,
    expert_bytes,
    kv_bytes_per_token,
    matrix_bytes,
    whole_weights,
)


@dataclass(frozen=True)
class ModelFacts:
    """Parameters are those of matrices. `flops_per_token`: of a token that attends to `context`
    tokens. `dense_bytes`: weights of a dense model with as many parameters as are active here."""

    total_params: int
    active_params: int
    routed_params: int
    flops_per_token: int
    context: int
    weights: Weights
    dense_bytes: int
    kv_bytes_per_token: int
    redundant_bytes: int
    """What one redundant expert per rank costs each GPU, over all layers."""

    def lines(self) -> list[str]:
        share, w = self.active_params / self.total_params, self.weights
        count = ("e9", 1e9) if self.total_params >= 1e9 else ("e6", 1e6)
        size = (" GB", 1e9) if w.total >= 1e9 else (" MB", 1e6)
        parts = " + ".join(
            f"{getattr(w, f.name) / size[1]:,.1f} {f.name}" for f in fields(w) if getattr(w, f.name)
        )
        return [
            f"parameters: {_in(count, self.total_params)}, {_in(count, self.active_params)} "
            f"({share:.1%}) active for a token, {_in(count, self.routed_params)} in routed experts",
            f"FLOPs per token: {_in(count, self.flops_per_token)} at {self.context:,} tokens",
            f"weights: {_in(size, w.total)} = {parts}",
            f"a dense model of the same active size: {_in(size, self.dense_bytes)}, "
            f"{w.total / self.dense_bytes:.1f} times less for about the same FLOPs",
            f"KV: {self.kv_bytes_per_token:,} bytes per token",
            f"one redundant expert per rank: {self.redundant_bytes / 2**30:.3g} GiB on each GPU",
        ]


def _in(unit: tuple[str, float], value: int) -> str:
    return f"{value / unit[1]:,.1f}{unit[0]}"


def native_dtype(spec: ModelSpec) -> str:
    """What the checkpoint's matrices are stored in."""
    return "float8_e4m3fn" if spec.quant else spec.dtype


def model_facts(
    spec: ModelSpec, context: int, dtype: str | None = None, kv_dtype: str = "bfloat16"
) -> ModelFacts:
    """`dtype`: of the weights; None is the checkpoint's own."""
    dtype = dtype or native_dtype(spec)
    return ModelFacts(
        total_params=spec.num_params,
        active_params=spec.active_params,
        routed_params=len(spec.moe_layers) * spec.moe.num_experts * spec.expert_params,
        flops_per_token=spec.flops_per_token(context),
        context=context,
        weights=whole_weights(spec, dtype),
        dense_bytes=matrix_bytes(spec, spec.active_params, dtype),
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_dtype),
        redundant_bytes=expert_bytes(spec, dtype),
    )
