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

TOKEN_BUCKETS = tuple(float(1 << i) for i in range(21))
"""Of "iteration_tokens": a step's, of all ranks together; all ranks observe the same."""

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
    "host_gap" (see `StepTimer`), "dispatch_apart" and "combine_apart" (exchanges on a stream of
    their own, beside other parts).

    On a CPU every span is timed by the host's clock. With `on_device` that clock would time
    launches alone: then a span costs the tests of two attributes, of which a `StepTiming` sets
    `marks` for the steps that are timed, and nothing else feeds the parts.
    """

    def __init__(
        self, histograms: tuple[str, ...] = ("dispatch", "combine"), on_device: bool = False
    ):
        self.on_device = on_device
        self.marks: Marks | None = None
        self.log: list[tuple[str, float, float]] | None = None
        """While tracing: (part, start, end) by the host's clock, as they end."""
        self.rows_LS: Any = None
        """The tensor behind the source "slot_tokens", for who must not wait for the device."""
        self.counters: dict[str, int] = {}
        self.histograms = {name: Histogram(EXCHANGE_BUCKETS_S) for name in histograms}
        self.histograms["iteration_tokens"] = Histogram(TOKEN_BUCKETS)
        self._parts = _Parts(self)
        self._sources: dict[str, Callable[[], Any]] = {}
        self._forget: list[Callable[[], object]] = []

    def add(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def span(self, part: str, pieces: int = 1) -> AbstractContextManager[None]:
        """Around what belongs to `part`, and not inside another span of it. Entered `pieces` times,
        with other work between, it still counts as one call."""
        marks = self.marks
        if marks is not None:
            return marks(part, pieces)
        if self.on_device:
            return _NOTHING
        return self._parts[part] if pieces == 1 else _Pieces(self, part, pieces)

    def host(self, part: str) -> AbstractContextManager[None]:
        """Around what the host does with or without a device: where there is one, it is only seen
        in a trace."""
        if not self.on_device:
            return self._parts[part]
        return _NOTHING if self.log is None else _Pieces(self, part, 1, counts=False)

    def observe(self, part: str, seconds: float) -> None:
        """What the host's clock saw until now; of a GPU it is only seen in a trace."""
        if self.log is not None:
            now = perf_counter()
            self.log.append((part, now - seconds, now))
        if not self.on_device:
            self.count(part, seconds)

    def count(self, part: str, seconds: float) -> None:
        self._parts[part].count(seconds)

    @property
    def seconds(self) -> dict[str, float]:
        """By part."""
        return {part: totals.seconds for part, totals in self._parts.items() if totals.calls}

    @property
    def calls(self) -> dict[str, int]:
        """By part."""
        return {part: totals.calls for part, totals in self._parts.items() if totals.calls}

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
        self._parts.clear()
        self.counters.clear()
        self.histograms = {name: Histogram(h.bounds) for name, h in self.histograms.items()}
        for forget in self._forget:
            forget()

    def snapshot(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "calls": self.calls,
            "counters": dict(self.counters),
            "histograms": {name: h.to_dict() for name, h in self.histograms.items()},
            **{name: read() for name, read in self._sources.items()},
        }


class _Part:
    """Totals of a part, and what stands around it on a CPU: the same object every time, since
    making one costs as much as the rest."""

    __slots__ = ("_histogram", "_name", "_recorder", "_start", "calls", "seconds")

    def __init__(self, recorder: Recorder, name: str):
        self._recorder, self._name = recorder, name
        self._histogram = recorder.histograms.get(name)
        self.seconds, self.calls = 0.0, 0

    def count(self, seconds: float) -> None:
        self.seconds += seconds
        self.calls += 1
        if self._histogram is not None:
            self._histogram.observe(seconds)

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        start, end = self._start, perf_counter()
        self.seconds += end - start
        self.calls += 1
        if self._histogram is not None:
            self._histogram.observe(end - start)
        log = self._recorder.log
        if log is not None:
            log.append((self._name, start, end))


class _Parts(dict[str, _Part]):
    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def __missing__(self, name: str) -> _Part:
        part = self[name] = _Part(self._recorder, name)
        return part


class _Pieces:
    """Of a part, `pieces` of which are one call. `counts` False: only for the log."""

    def __init__(self, recorder: Recorder, name: str, pieces: int, counts: bool = True):
        self._recorder, self._name, self._pieces, self._counts = recorder, name, pieces, counts
        self._seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        end, recorder = perf_counter(), self._recorder
        self._seconds += end - self._start
        self._pieces -= 1
        if recorder.log is not None:
            recorder.log.append((self._name, self._start, end))
        if not self._pieces and self._counts:
            recorder.count(self._name, self._seconds)
