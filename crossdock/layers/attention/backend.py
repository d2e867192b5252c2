"""Which attention a model is built with: chosen once, named, and never switched silently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from crossdock.core import ConfigError, ForwardBatch, GQASpec, MLASpec
from crossdock.core.batch import CapturedStep
from crossdock.layers.attention.flashinfer_library import (
    AttentionCase,
    load_flashinfer,
    why_not_flashinfer,
    why_rather_not,
)
from crossdock.layers.attention.gqa import GQAttention
from crossdock.layers.attention.mla import MLAttention
from crossdock.layers.attention.plan import AttentionPlanner
from crossdock.layers.rope import Rope

AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
Planner = Callable[[ForwardBatch, int], Any]
"""(batch, page size) to the plan that the layers of the same backend take."""


@runtime_checkable
class LaysOut(Protocol):
    """A planner that wants to know, on the host, of a step that is captured or replayed next."""

    def lay_out(self, step: CapturedStep) -> None: ...


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
    name: AttentionName,
    device: torch.device,
    dtype: torch.dtype,
    invariant: bool,
    case: AttentionCase | None = None,
) -> AttentionBackend:
    """auto: on a GPU in 16 bits "flashinfer" where it can serve `case` (None: it cannot), else
    "triton"; "torch" elsewhere; in invariant mode "torch", or on a GPU "invariant".

    Raises:
        ConfigError: "triton" or "flashinfer" where it cannot run.
    """
    reasons = {
        "invariant mode has one attention path, its own": invariant,
        f"its kernels need a GPU, not {device.type}": device.type != "cuda",
        f"its kernels are made for 16 bits, not {dtype}": dtype.itemsize != 2,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    named = name in ("triton", "flashinfer")
    if not named and invariant and device.type == "cuda":
        return invariant_attention(dtype)
    if name == "torch" or (name == "auto" and against):
        return _torch("as asked" if name == "torch" else str(against), device, dtype, invariant)
    if against:
        raise ConfigError(f'attention "{name}" cannot run: {against}; use "torch" or "auto"')
    fp8_cache = case is not None and case.fp8_cache
    if name == "triton" or (name == "auto" and case is None):
        return triton_attention(device, fp8_cache)
    assert case is not None
    why_not = why_rather_not(case) if name == "auto" else None
    why_not = why_not or why_not_flashinfer(case, device, dtype)
    if why_not and name == "flashinfer":
        raise ConfigError(f'attention "flashinfer" cannot run: {why_not}; use "triton" or "auto"')
    if why_not:
        return triton_attention(device, fp8_cache, f"a GPU, 16 bits; FlashInfer: {why_not}")
    return flashinfer_attention(load_flashinfer(), case, device, dtype)


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


def triton_attention(
    device: torch.device, fp8_cache: bool, reason: str = "a GPU, 16 bits"
) -> AttentionBackend:
    """The kernels' backend wherever they can run, the interpreter included."""
    # These import triton, which ranks on CPUs do without.
    from crossdock.layers.attention.paged_gqa import PagedGQAttention
    from crossdock.layers.attention.paged_mla import PagedMLAttention
    from crossdock.layers.attention.paged_plan import PagedPlanner

    return AttentionBackend(
        "triton",
        reason,
        PagedGQAttention,
        PagedMLAttention,
        lambda spec, rope: PagedPlanner(spec, rope, device, fp8_cache),
    )


def flashinfer_attention(
    library: Any, case: AttentionCase, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """FlashInfer's kernels for one kind of rows, Triton's for the others."""
    from crossdock.layers.attention.flashinfer_layers import (  # imports triton
        FlashInferGQAttention,
        FlashInferMLAttention,
    )
    from crossdock.layers.attention.flashinfer_plan import FlashInferPlanner

    kinds = ("decodes", "prompts") if isinstance(case.spec, MLASpec) else ("prompts", "decodes")
    return AttentionBackend(
        "flashinfer",
        f"{library.__version__}, {kinds[0]} of whole steps; {kinds[1]} and halves on Triton's",
        FlashInferGQAttention,
        FlashInferMLAttention,
        lambda spec, rope: FlashInferPlanner(library, case, rope, device, dtype),
    )
