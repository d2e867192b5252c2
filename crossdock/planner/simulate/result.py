"""What a simulation found, and how it is told from what its requests went through."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Verdict = Literal["steady", "overloaded", "too short"]

GROWTH = 0.02
"""Share of the arriving requests that may pile up before a load counts as too much."""


@dataclass(slots=True)
class Record:
    """One request's times in seconds; nan until they are known."""

    arrival_s: float
    isl: int
    osl: int
    first_s: float = math.nan
    end_s: float = math.nan
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """nan for a single token."""
        return (self.end_s - self.first_s) / (self.osl - 1) if self.osl > 1 else math.nan


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        known = np.array([v for v in values if not math.isnan(v)])
        if not len(known):
            return cls(math.nan, math.nan, math.nan, math.nan)
        return cls(float(known.mean()), *(float(np.percentile(known, q)) for q in (50, 90, 99)))


@dataclass(frozen=True)
class Series:
    """Over time, at equal distances: open requests without a first token, open requests, and the
    used share of all KV pages, by pool."""

    time_s: tuple[float, ...]
    queued: tuple[int, ...]
    open: tuple[int, ...]
    kv_used: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class PoolResult:
    """busy: share of the time in which a step ran. fill: mean over fullest group's tokens, summed
    over steps. imbalance: of experts, mean over steps. rank_steps, tokens (computed): of all ranks,
    those counted that a simulated one stands for. prefix_hits: share of the prompts' tokens."""

    gpus: int
    steps: int
    rank_steps: int
    tokens: int
    step_s: float
    busy: float
    fill: float
    imbalance: float
    preemptions: int
    prefix_hits: float
    rebalances: int
    moved_bytes: int


@dataclass(frozen=True)
class SimResult:
    """Of all GPUs, whatever `stand_for` was; rates are per second. Unless the verdict is "steady"
    there is no throughput: rates, goodput and latencies are None. `open_growth`: open requests that
    came to stay, as a share of the arriving ones. Without limits goodput is the request rate."""

    verdict: Verdict
    why: str
    duration_s: float
    requests: int
    finished: int
    failed: int
    offered_rate: float
    open_growth: float
    request_rate: float | None
    input_rate: float | None
    output_rate: float | None
    output_rate_per_gpu: float | None
    goodput: float | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    kv_transfer_s: Spread | None
    pools: dict[str, PoolResult]
    series: Series

    def to_json(self) -> dict[str, Any]:
        """nan as null."""
        return _finite(asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def judge(
    records: Sequence[Record], duration_s: float, stand_for: int = 1
) -> tuple[Verdict, float, str]:
    """`(verdict, growth, why)`: do open requests pile up while they arrive?

    Their number, averaged over the second and over the fourth quarter of the time of arrivals, may
    differ by noise, of the order of the root of the arrivals between. It grows too while a system
    that starts empty fills; then no more than usual wait for their first token.
    """
    opened_s, first_s, closed_s = (
        np.array([getattr(r, name) for r in records]) for name in ("arrival_s", "first_s", "end_s")
    )
    first_s = np.where(np.isnan(first_s), closed_s, first_s)  # refused
    quarter = duration_s / 4
    arrived = int((opened_s >= 2 * quarter).sum())
    noise = max(GROWTH * arrived, 2 * math.sqrt(arrived))
    before, after = (_mean_open(opened_s, closed_s, i * quarter, quarter) for i in (1, 3))
    waited, waiting = (_mean_open(opened_s, first_s, i * quarter, quarter) for i in (1, 3))
    growth = (after - before) / max(arrived, 1)
    why = (
        f"open requests: {stand_for * before:,.0f} on average in the second quarter of "
        f"{duration_s:,.4g} s, {stand_for * after:,.0f} in the fourth"
    )
    if after - before <= noise:
        return "steady", growth, why
    latency = float(np.mean(closed_s - opened_s))
    if waiting - waited <= noise and latency > quarter:
        return (
            "too short",
            growth,
            f"{why}; a request takes {latency:.3g} s: simulate {8 * latency:.3g} s or more",
        )
    return "overloaded", growth, why


def _mean_open(opened_s: np.ndarray, closed_s: np.ndarray, low: float, length: float) -> float:
    inside = np.minimum(closed_s, low + length) - np.maximum(opened_s, low)
    return float(inside.clip(0).sum() / length) if length > 0 else 0.0
