"""The parts of one pass over a device, by events around its spans."""

from collections.abc import Iterator
from contextlib import contextmanager

from crossdock.metrics.clock import Clock, CudaClock, Event
from crossdock.metrics.recorder import Marks, Recorder


class StepTiming:
    """Eagerly, for one pass at a time; or, with `external`, while a CUDA graph is captured, and
    then for every replay of it:

        timing = StepTiming(recorder, external=True)
        with torch.cuda.graph(graph), timing.recording():
            out = forward()
        graph.replay()
        ...                                   # later, once the device is past it
        timing.read()["attention"]            # seconds in this replay

    The events of a span lie on the stream that is current there. What runs on another stream
    meanwhile is not seen; what this stream waits for it is.
    """

    def __init__(self, recorder: Recorder, external: bool = False, clock: Clock | None = None):
        self._recorder, self._external = recorder, external
        self._clock: Clock = clock or CudaClock()
        self._events: list[Event] = []
        self._used = 0
        self._spans: list[_DeviceSpan] = []
        self._before: Marks | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Spans within are timed; what was recorded before is forgotten."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        self._spans, self._used = [], 0
        self._before, self._recorder.marks = self._recorder.marks, self._mark

    def stop(self) -> None:
        self._recorder.marks = self._before

    def calls(self) -> list[tuple[str, float]]:
        """Part and seconds of each span, in order. The device must be past the last of them."""
        return [(span.part, span.seconds()) for span in self._spans]

    def read(self) -> dict[str, float]:
        """Seconds of each part; as `calls`."""
        seconds: dict[str, float] = {}
        for part, took in self.calls():
            seconds[part] = seconds.get(part, 0.0) + took
        return seconds

    def intervals(self, base: Event) -> list[tuple[str, float, float]]:
        """Part, start and end in seconds since `base`, of every piece; as `calls`."""
        return [
            (span.part, base.elapsed_time(start) / 1e3, base.elapsed_time(end) / 1e3)
            for span in self._spans
            for start, end in span.pieces
        ]

    def event(self) -> Event:
        """Recorded now. Kept for the next pass: making one takes longer than recording it."""
        if self._used == len(self._events):
            self._events.append(self._clock.event(self._external))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def _mark(self, part: str, pieces: int) -> "_DeviceSpan":
        span = _DeviceSpan(self, part)
        self._spans.append(span)
        return span


class _DeviceSpan:
    __slots__ = ("_start", "_timing", "part", "pieces")

    def __init__(self, timing: StepTiming, part: str):
        self._timing, self.part = timing, part
        self.pieces: list[tuple[Event, Event]] = []

    def __enter__(self) -> None:
        self._start = self._timing.event()

    def __exit__(self, *_: object) -> None:
        self.pieces.append((self._start, self._timing.event()))

    def seconds(self) -> float:
        return sum(start.elapsed_time(end) for start, end in self.pieces) / 1e3
