"""What one rank measures of itself. Totals since its start; knows neither torch nor Prometheus.

Rooms mark the parts of a step with `span`; the engine asks for a `snapshot`, which travels to the
gateway.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

EXCHANGE_BUCKETS_S = (
    25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 51.2e-3,
    0.2, 1.0,
)  # fmt: skip

Marks = Callable[[str, int], AbstractContextManager[None]]
"""(part, pieces) -> what stands around each piece."""
_NOTHING: AbstractContextManager[None] = nullcontext()


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
    "combine", "dense", "norm", "sample"; "wait" (for other ranks; also counted in the part that
    waited), "counts" (ranks exchange them to choose replicas; also counted in "router"); on a GPU
    "host_gap" (see `StepTimer`).

    On a CPU every span is timed by the host's clock. With `on_device` that clock would time
    launches alone: then a span costs the test of `marks`, which a `StepTiming` sets for the steps
    that are timed, and nothing else feeds the parts.
    """

    def __init__(
        self, histograms: tuple[str, ...] = ("dispatch", "combine"), on_device: bool = False
    ):
        self.on_device = on_device
        self.marks: Marks | None = None if on_device else self._host_span
        self.log: list[tuple[str, float, float]] | None = None
        """While tracing: (part, start, end) by the host's clock, as they end."""
        self.rows_LS: Any = None
        """The tensor behind the source "slot_tokens", for who must not wait for the device."""
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self.histograms = {name: Histogram(EXCHANGE_BUCKETS_S) for name in histograms}
        self._sources: dict[str, Callable[[], Any]] = {}
        self._forget: list[Callable[[], object]] = []

    def add(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def span(self, part: str, pieces: int = 1) -> AbstractContextManager[None]:
        """Around what belongs to `part`. Entered `pieces` times, with other work between, it still
        counts as one call."""
        marks = self.marks
        return _NOTHING if marks is None else marks(part, pieces)

    def host(self, part: str) -> AbstractContextManager[None]:
        """Around what the host does with or without a device: where there is one, it is only seen
        in a trace."""
        return _NOTHING if self.on_device and self.log is None else self._host_span(part, 1)

    def observe(self, part: str, seconds: float) -> None:
        """What the host's clock saw until now; of a GPU it is only seen in a trace."""
        if self.log is not None:
            now = perf_counter()
            self.log.append((part, now - seconds, now))
        if not self.on_device:
            self.count(part, seconds)

    def count(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.calls[part] = self.calls.get(part, 0) + 1
        histogram = self.histograms.get(part)
        if histogram is not None:
            histogram.observe(seconds)

    def _host_span(self, part: str, pieces: int) -> "_HostSpan":
        return _HostSpan(self, part, pieces)

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


class _HostSpan:
    """By hand: a generator's context manager takes three times as long."""

    __slots__ = ("_part", "_pieces", "_recorder", "_seconds", "_start")

    def __init__(self, recorder: Recorder, part: str, pieces: int):
        self._recorder, self._part, self._pieces = recorder, part, pieces
        self._seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        end, recorder = perf_counter(), self._recorder
        self._seconds += end - self._start
        self._pieces -= 1
        if recorder.log is not None:
            recorder.log.append((self._part, self._start, end))
        if not self._pieces and not recorder.on_device:
            recorder.count(self._part, self._seconds)
