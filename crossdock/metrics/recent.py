"""What the totals grew by lately."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from crossdock.metrics.totals import Totals

RECENT_S = 30.0
"""Rates and shares called recent go back at least this far, or to the start of the gateway."""
_NAMES = (
    "prompt_tokens_total", "generation_tokens_total", "steps", "seconds.step", "seconds.wait",
    "seconds.dispatch", "seconds.combine", "timed_ns", "timed_flops", "timed_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class _Reading:
    """Totals by name and rank at one time."""

    time: float
    totals: dict[str, dict[int, float]] = field(default_factory=dict)

    def of(self, name: str) -> dict[int, float]:
        return self.totals.get(name, {})

    def sum(self, name: str) -> float:
        return sum(self.of(name).values())


class Recent:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._readings = deque([_Reading(clock())])

    def remember(self, totals: Totals) -> None:
        now = self._clock()
        values = {
            name: {rank: float(v) for rank, v in totals.per_rank(name).items()} for name in _NAMES
        }
        self._readings.append(_Reading(now, values))
        while len(self._readings) > 2 and now - self._readings[1].time >= RECENT_S:
            self._readings.popleft()

    def per_rank(self, part: str, whole: str) -> dict[int, float]:
        """By rank, how much `part` grew for each by which `whole` did; where that did not grow,
        since the start."""
        base, now = self._readings[0], self._readings[-1]
        found = {}
        for rank, total in now.of(whole).items():
            share = now.of(part).get(rank, 0.0)
            grew = total - base.of(whole).get(rank, 0.0)
            if grew > 0:
                total, share = grew, share - base.of(part).get(rank, 0.0)
            if total > 0:
                found[rank] = share / total
        return found

    def over_ranks(self, part: str, whole: str) -> float | None:
        """The same of sums over ranks; None where `whole` never grew."""
        base, now = self._readings[0], self._readings[-1]
        total, share = now.sum(whole), now.sum(part)
        if total > base.sum(whole):
            total, share = total - base.sum(whole), share - base.sum(part)
        return share / total if total > 0 else None

    def rate(self, name: str) -> float:
        """Per second, over ranks."""
        base, now = self._readings[0], self._readings[-1]
        seconds = now.time - base.time
        return (now.sum(name) - base.sum(name)) / seconds if seconds > 0 else 0.0
