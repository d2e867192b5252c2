"""One instance of one layout over its batch sizes: how fast, how late, and what stops it."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from crossdock.planner.layout import Layout, Phase, Workload
from crossdock.planner.search_space import LOW_LATENCY_TOKENS, PREFILL_TOKENS, decode_batches

MOST_SEQUENCES = 4096
"""Of an attention group: beyond it every throughput curve seen is flat."""
WORTH = 0.02
"""Gain in throughput below which a larger batch, or more replicas, are not worth their latency and
memory."""
HALF_A_STEP = 0.5
"""What a request that comes at any moment waits, on average, for the step that runs then."""


class Step(Protocol):
    """What is asked of a priced step; seconds."""

    @property
    def total(self) -> float: ...

    @property
    def parts(self) -> Mapping[str, float]: ...

    @property
    def hidden(self) -> float: ...

    @property
    def exposed_communication(self) -> float: ...

    @property
    def explain(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Fit:
    """Of one GPU of a layout. `kv_tokens`: what an attention group can hold; `short_bytes`: how
    much memory is missing even without KV, 0 where the layout fits; `weights_share`: of the
    memory that may be filled."""

    kv_tokens: int
    short_bytes: int = 0
    weights_share: float = 0.0


class Pricing(Protocol):
    """The search's whole knowledge of formulas."""

    def fit(self, layout: Layout) -> Fit: ...

    def step(self, layout: Layout, phase: Phase, tokens_per_gpu: float, context: float) -> Step: ...


@dataclass(frozen=True)
class Point:
    """A layout at one batch: tokens of a prefill step or sequences in decode, per GPU.

    `latency_s`: prefill: from arrival to the end of the prompt with every step full, half a step
    of waiting included; decode: of a step. `fit`: of the layout at this batch.
    """

    layout: Layout
    phase: Phase
    batch: float
    step: Step
    latency_s: float
    requests_per_gpu_s: float
    fit: Fit


@dataclass(frozen=True)
class Curve:
    """Points of one layout with rising batch, all within memory. `end`: what stops it there."""

    points: tuple[Point, ...]
    end: str

    @property
    def layout(self) -> Layout:
        return self.points[0].layout

    @cached_property
    def peak(self) -> Point:
        return max(self.points, key=lambda p: p.requests_per_gpu_s)

    def best(self, latency_s: float | None) -> Point | None:
        """The smallest batch within the limit beyond which nothing worth it is gained; None where
        even one is too slow."""
        within = [p for p in self.points if latency_s is None or p.latency_s <= latency_s]
        if not within:
            return None
        enough = (1 - WORTH) * max(p.requests_per_gpu_s for p in within)
        return next(p for p in within if p.requests_per_gpu_s >= enough)

    def carrying(self, requests_per_gpu_s: float) -> Point:
        """The smallest batch that carries a load; the peak where none does."""
        enough = (p for p in self.points if p.requests_per_gpu_s >= requests_per_gpu_s)
        return min(enough, key=lambda p: p.batch, default=self.peak)

    def bound(self, point: Point, limit_s: float | None, limit: str) -> str:
        """Why the batch is no larger than the point's."""
        larger = [p for p in self.points if p.batch > point.batch]
        if not larger:
            return self.end
        nearest = larger[0]
        if limit_s is not None and nearest.latency_s > limit_s:
            return (
                f"{limit}: {nearest.batch:,.0f} would take {nearest.latency_s * 1e3:,.1f} ms, "
                f"limit {limit_s * 1e3:,.0f} ms"
            )
        gain = max(p.requests_per_gpu_s for p in larger) / point.requests_per_gpu_s - 1
        if gain <= 0:
            return f"throughput: {nearest.batch:,.0f} would not be faster"
        return f"throughput: larger ones would gain {gain:.1%}"


def prefill_curve(pricing: Pricing, layout: Layout, work: Workload) -> Curve | Fit:
    """Full steps of 256 to 32,768 tokens per GPU. A `Fit` says that nothing fits, and by how
    much."""
    points: list[Point] = []
    end = f"step size: {PREFILL_TOKENS[-1]:,} tokens per GPU is the largest looked at"
    for tokens in PREFILL_TOKENS:
        sized = replace(layout, max_tokens_per_rank=tokens)
        fit = pricing.fit(sized)
        # The prompts of this step and those of the last one, on their way to decode.
        needed = 2 * max(tokens * layout.tp, work.isl)
        if fit.short_bytes or fit.kv_tokens < needed:
            if not points:
                return fit
            end = f"memory: {tokens:,} tokens per GPU and step do not fit"
            break
        points.append(_prefill_point(pricing, sized, work, tokens, fit))
        if _falling(points):
            break
    return Curve(tuple(points), end)


def _prefill_point(
    pricing: Pricing, layout: Layout, work: Workload, tokens: int, fit: Fit
) -> Point:
    step = pricing.step(layout, "prefill", tokens, mean_prefill_context(work.isl))
    steps = max(1.0, work.isl / (tokens * layout.tp))  # a long prompt goes in chunks
    return Point(
        layout=layout,
        phase="prefill",
        batch=tokens,
        step=step,
        latency_s=(steps + HALF_A_STEP) * step.total,
        requests_per_gpu_s=tokens / step.total / work.isl,
        fit=fit,
    )


def decode_curve(pricing: Pricing, layout: Layout, work: Workload) -> Curve | Fit:
    """Sequences from 1 per attention group to what KV, buffers or sense allow."""
    length = work.isl + work.osl

    def held(sequences: int) -> int:
        """Sequences that have KV beside the buffers for `sequences`, with room for chance."""
        fit = pricing.fit(_sized(layout, sequences))
        return 0 if fit.short_bytes else steady_sequences(fit.kv_tokens // length)

    least = pricing.fit(_sized(layout, 1))
    if held(1) < 1:
        return least
    most, end = MOST_SEQUENCES, f"batch: {MOST_SEQUENCES:,} sequences is the largest looked at"
    if layout.mode == "low_latency" and most > LOW_LATENCY_TOKENS * layout.tp:
        most = LOW_LATENCY_TOKENS * layout.tp
        end = f"low-latency transport: at most {LOW_LATENCY_TOKENS:,} tokens per GPU and step"
    if held(most) < most:
        most = _largest(lambda n: held(n) >= n, most)
        fit = pricing.fit(_sized(layout, most))
        end = (
            f"KV memory: an attention group's {fit.kv_tokens:,} tokens are "
            f"{fit.kv_tokens // length:,} requests of {length:,}, {most:,} with room for chance"
        )
    points: list[Point] = []
    for sequences in decode_batches(most):
        points.append(_decode_point(pricing, layout, work, sequences))
        if _falling(points):
            break
    return Curve(tuple(points), end)


def _sized(layout: Layout, sequences: int) -> Layout:
    return replace(layout, max_tokens_per_rank=max(1, -(-sequences // layout.tp)))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number below `most` for which `holds`, which 1 does; it falls once."""
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _decode_point(pricing: Pricing, layout: Layout, work: Workload, sequences: int) -> Point:
    sized, per_gpu = _sized(layout, sequences), sequences / layout.tp
    step = pricing.step(sized, "decode", per_gpu, mean_decode_context(work))
    return Point(
        layout=sized,
        phase="decode",
        batch=per_gpu,
        step=step,
        latency_s=step.total,
        requests_per_gpu_s=per_gpu / step.total / work.osl,
        fit=pricing.fit(sized),
    )


def steady_sequences(held: int) -> int:
    """The mean number of sequences at which an attention group that can hold `held` seldom has to
    turn one away: arrivals are random, so that their number varies by its root; two of these."""
    return max(min(held, 1), int((math.sqrt(held + 1) - 1) ** 2))


def mean_prefill_context(isl: int) -> float:
    """Tokens that a prompt's token attends to, on average."""
    return isl / 2


def mean_decode_context(work: Workload) -> float:
    return work.isl + work.osl / 2


def within_limit(pricing: Pricing, curve: Curve, work: Workload, limit_s: float | None) -> Curve:
    """The curve with the largest batch within a decode limit added: the grid steps by a third."""
    if limit_s is None:
        return curve
    inside = [p for p in curve.points if p.latency_s <= limit_s]
    outside = [p for p in curve.points if p.latency_s > limit_s]
    if not inside or not outside:
        return curve
    low, high, tp = inside[-1], outside[0], curve.layout.tp
    while (high.batch - low.batch) * tp > max(1, low.batch * tp // 64):
        sequences = round((low.batch + high.batch) * tp / 2)
        middle = _decode_point(pricing, low.layout, work, sequences)
        low, high = (middle, high) if middle.latency_s <= limit_s else (low, middle)
    points = {p.batch: p for p in (*curve.points, low, high)}
    return Curve(tuple(points[b] for b in sorted(points)), curve.end)


def _falling(points: list[Point]) -> bool:
    """Two batches past the peak: it only gets worse."""
    rates = [p.requests_per_gpu_s for p in points]
    return len(rates) >= 3 and rates[-1] < rates[-2] < rates[-3]


def frontier(points: Iterable[Point]) -> list[Point]:
    """Points that no other beats in both latency and rate, by rising latency."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.latency_s, -p.requests_per_gpu_s)):
        if not kept or point.requests_per_gpu_s > kept[-1].requests_per_gpu_s:
            kept.append(point)
    return kept
