"""Where a layer's time went: kernels that the profiler saw, sorted by what they are for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType

ROUTER, DISPATCH, PLACE, GEMM1, SWIGLU, GEMM2, COMBINE, OTHER, GAPS = PARTS = (
    "router",
    "dispatch",
    "place and gather",
    "gemm 1",
    "swiglu and quantise",
    "gemm 2",
    "combine",
    "other",
    "between kernels",
)
_BY_PREFIX = (
    ("dispatch_", DISPATCH),
    ("combine_", COMBINE),
    ("place_rows", PLACE),
    ("_gather", PLACE),
    ("_swiglu", SWIGLU),
    ("_quantise", SWIGLU),
    ("_grouped_kernel", SWIGLU),
    ("_add_wave", COMBINE),
)
_PRODUCTS = (
    "hopper_kernel",
    "hopper_bf16_kernel",
    "grouped_kernel",
    "masked_kernel",
    "masked_bf16_kernel",
    "gemm",
    "cutlass",
    "Gemm",
)
_NO_PRODUCTS = ("prepare", "transpose")
_MOST_NAMES = 12


@dataclass(frozen=True)
class Span:
    """A kernel; us."""

    name: str
    start: float
    end: float


def profile(launch: Callable[[], object]) -> list[Span]:
    """The kernels of a launch, in order; none where the profiler does not work."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        launch()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(spans, key=lambda span: span.start)


def parts_of(spans: Sequence[Span]) -> dict[str, Any]:
    """Mean us of a repetition by part, and by kernel for those that take longest. Repetitions lie
    between alignments; the kernel before an alignment is the meter's flush. Empty without any."""
    aligned = [i for i, span in enumerate(spans) if span.name.startswith("_align")]
    repetitions = [spans[a + 1 : b - 1] for a, b in pairwise(aligned) if b - 1 > a + 1]
    if not repetitions:
        return {}
    totals, names = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    for repetition in repetitions:
        end, products = repetition[0].start, 0
        arrived = False
        for span in repetition:
            arrived |= span.name.startswith("dispatch_")
            part = _part(span.name, arrived)
            if part == GEMM1:  # the two products of a wave take turns
                part, products = (GEMM1, GEMM2)[products % 2], products + 1
            took = span.end - span.start
            totals[part] += took
            names[span.name] = names.get(span.name, 0.0) + took
            totals[GAPS] += max(0.0, span.start - end)
            end = max(end, span.end)
    count = len(repetitions)
    longest = sorted(names.items(), key=lambda item: -item[1])[:_MOST_NAMES]
    return {
        "parts": {part: us / count for part, us in totals.items()},
        "kernels": {name[:80]: us / count for name, us in longest},
    }


def _part(name: str, arrived: bool) -> str:
    for prefix, part in _BY_PREFIX:
        if name.startswith(prefix):
            return part
    if not arrived:
        return ROUTER
    product = any(word in name for word in _PRODUCTS)
    return GEMM1 if product and not any(word in name for word in _NO_PRODUCTS) else OTHER
