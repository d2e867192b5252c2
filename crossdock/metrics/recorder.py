"""What one rank measures of itself. Totals since its start; knows neither torch nor Prometheus.

Rooms time themselves with `span`; the engine asks for a `snapshot`, which travels to the gateway.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EXCHANGE_BUCKETS_S = (
    25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 51.2e-3,
    0.2, 1.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket (upper bounds inclusive, the last open), sum and number of observations."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "counts": list(self.counts), "sum": self.sum}


class Recorder:
    """Counters (`add`), timed parts (`span`), histograms of some of them, and pulled sources.

    Parts in use: "step", "agree", "attention", "router", "dispatch", "experts", "shared",
    "combine", "wait" (for other ranks; also counted in the part that waited), "counts" (ranks
    exchange them to choose replicas; also counted in "router"), "sample". On a GPU a span times the
    host's side of a part alone.
    """

    def __init__(self, histograms: tuple[str, ...] = ("dispatch", "combine")):
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self.histograms = {name: Histogram(EXCHANGE_BUCKETS_S) for name in histograms}
        self._sources: dict[str, Callable[[], Any]] = {}
        self._forget: list[Callable[[], object]] = []

    def add(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def observe(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.calls[part] = self.calls.get(part, 0) + 1
        histogram = self.histograms.get(part)
        if histogram is not None:
            histogram.observe(seconds)

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe(part, time.perf_counter() - start)

    def source(
        self, name: str, read: Callable[[], Any], forget: Callable[[], object] | None = None
    ) -> None:
        """`read` is called at each snapshot; it returns something JSON can hold. `forget`: sets
        what it reads back to nothing."""
        self._sources[name] = read
        if forget is not None:
            self._forget.append(forget)

    def reset(self) -> None:
        """Forgets all that was measured so far; before the first snapshot."""
        for totals in (self.seconds, self.calls, self.counters):
            totals.clear()
        self.histograms = {name: Histogram(h.bounds) for name, h in self.histograms.items()}
        for forget in self._forget:
            forget()

    def snapshot(self) -> dict[str, Any]:
        return {
            "seconds": dict(self.seconds),
            "calls": dict(self.calls),
            "counters": dict(self.counters),
            "histograms": {name: h.to_dict() for name, h in self.histograms.items()},
            **{name: read() for name, read in self._sources.items()},
        }
