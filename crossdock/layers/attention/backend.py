"""Which attention a model is built with: chosen once, named, and never switched silently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from crossdock.core import ConfigError, ForwardBatch, GQASpec, MLASpec
from crossdock.layers.attention.gqa import GQAttention
from crossdock.layers.attention.mla import MLAttention
from crossdock.layers.attention.plan import AttentionPlanner
from crossdock.layers.rope import Rope

AttentionName = Literal["auto", "torch", "triton"]
Planner = Callable[[ForwardBatch, int], Any]
"""(batch, page size) to the plan that the layers of the same backend take."""


@dataclass(frozen=True)
class AttentionBackend:
    """`gqa` and `mla` are called as `GQAttention` and `MLAttention` are; their layers take
    (x_TH, cache, plan) with a plan from `planner(spec, rope)`."""

    name: str
    reason: str
    gqa: Callable[..., Any]
    mla: Callable[..., Any]
    planner: Callable[[GQASpec | MLASpec, Rope], Planner]


def choose_attention(
    name: AttentionName, device: torch.device, dtype: torch.dtype, invariant: bool
) -> AttentionBackend:
    """auto: "triton" on a GPU in 16 bits, "torch" elsewhere; in invariant mode "torch", or on a GPU
    "invariant".

    Raises:
        ConfigError: "triton" where it cannot run.
    """
    reasons = {
        "invariant mode has one attention path, its own": invariant,
        f"its kernels need a GPU, not {device.type}": device.type != "cuda",
        f"its kernels are made for 16 bits, not {dtype}": dtype.itemsize != 2,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if name != "triton" and invariant and device.type == "cuda":
        return invariant_attention(dtype)
    if name == "torch" or (name == "auto" and against):
        return _torch("as asked" if name == "torch" else str(against), device, dtype, invariant)
    if against:
        raise ConfigError(f'attention "triton" cannot run: {against}; use "torch" or "auto"')
    return triton_attention(device)


def _torch(
    reason: str, device: torch.device, dtype: torch.dtype, invariant: bool
) -> AttentionBackend:
    def planner(spec: GQASpec | MLASpec, rope: Rope) -> AttentionPlanner:
        return AttentionPlanner(rope, dtype, getattr(spec, "sliding_window", None), invariant)

    return AttentionBackend("torch", reason, GQAttention, MLAttention, planner)


def invariant_attention(dtype: torch.dtype) -> AttentionBackend:
    """Torch's layers around a kernel of fixed tiles."""
    from crossdock.kernels.attention_invariant import tile_tokens  # imports triton

    def planner(spec: GQASpec | MLASpec, rope: Rope) -> AttentionPlanner:
        sharing = spec.num_heads
        if isinstance(spec, GQASpec):
            sharing //= spec.num_kv_heads
        window = getattr(spec, "sliding_window", None)
        return AttentionPlanner(rope, dtype, window, True, tile_tokens(sharing, dtype))

    reason = "a row's bits do not depend on others"
    return AttentionBackend("invariant", reason, GQAttention, MLAttention, planner)


def triton_attention(device: torch.device) -> AttentionBackend:
    """The kernels' backend wherever they can run, the interpreter included."""
    # These import triton, which ranks on CPUs do without.
    from crossdock.layers.attention.paged_gqa import PagedGQAttention
    from crossdock.layers.attention.paged_mla import PagedMLAttention
    from crossdock.layers.attention.paged_plan import PagedPlanner

    return AttentionBackend(
        "triton",
        "a GPU, 16 bits",
        PagedGQAttention,
        PagedMLAttention,
        lambda spec, rope: PagedPlanner(spec, rope, device),
    )
