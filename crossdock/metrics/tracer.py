"""A trace of some steps on one rank: begun by all ranks at the same step, kept until they ran."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from crossdock.metrics.clock import Clock, Event
from crossdock.metrics.recorder import Recorder

Size = tuple[int, int, int, int, int]
Interval = tuple[int, str, int, int]
"""(step, part, start, end), in ns of CLOCK_MONOTONIC, which ranks of one host share."""
NS = 1_000_000_000


@dataclass(frozen=True)
class TracedSteps:
    """What one rank did. `intervals` as `Interval`; parts of a device lie on its own timeline.
    `steps`: (step, tokens, decodes among them, operations, bytes)."""

    id: int
    intervals: tuple[Interval, ...] = ()
    steps: tuple[Size, ...] = ()


class Tracer:
    """`active`: steps are being traced now."""

    def __init__(self, recorder: Recorder, clock: Clock):
        self._recorder, self._clock = recorder, clock
        self._wish: tuple[int, int] | None = None
        self._id = self._left = 0
        self._base: Event | None = None
        self._base_s = 0.0
        self._steps: list[Size] = []
        self._ends: list[float] = []
        self._intervals: list[Interval] = []
        self._ended: list[TracedSteps] = []

    @property
    def active(self) -> bool:
        return self._left > 0

    @property
    def word(self) -> int:
        """For the lockstep: the trace that this rank is asked for, else 0."""
        return 0 if self._wish is None else self._wish[0]

    def ask(self, id: int, steps: int) -> None:
        """Trace the next `steps` steps that run, once all ranks are asked for it. `id`: above 0. No
        steps: give up `id`, or end it with what there is."""
        if steps:
            self._wish = (id, steps)
        elif self.word == id:
            self._wish = None
            self._ended.append(TracedSteps(id))
        elif self._id == id:
            self._left = 0

    def heard(self, words_R: Sequence[int]) -> None:
        """`words_R`: of all ranks, in this step."""
        if self._wish is None or self._id or set(words_R) != {self.word}:
            return
        (self._id, self._left), self._wish = self._wish, None
        self._recorder.log, self._steps, self._ends, self._intervals = [], [], [], []
        if self._clock.on_device:
            self._base = self._clock.event()
            self._base.record()
            self._base.synchronize()  # the device idles: this one is recorded when it is asked for
            before = perf_counter()
            self._base.record()
            self._base.synchronize()
            self._base_s = (before + perf_counter()) / 2

    def ran(self) -> None:
        """A step, until now by the host's clock."""
        self._ends.append(perf_counter())
        self._left -= 1

    def size(self, *size: *Size) -> None:
        """Of each step that ran, in their order."""
        self._steps.append(size)

    def add(self, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """Of a device: part, start and end in seconds since the event `base`."""
        at = self._base_s
        self._intervals += [
            (step, part, int((at + start) * NS), int((at + end) * NS)) for part, start, end in spans
        ]

    @property
    def base(self) -> Event | None:
        """An event of the device, of which the host knows the time."""
        return self._base

    @property
    def complete(self) -> bool:
        """All steps ran; their times may still have to be read."""
        return self._id > 0 and self._left == 0

    def finish(self) -> None:
        """All times are read."""
        log, self._recorder.log = self._recorder.log or [], None
        for part, start, end in log:
            at = bisect_left(self._ends, start)
            if at < len(self._ends):
                self._intervals.append((self._steps[at][0], part, int(start * NS), int(end * NS)))
        self._intervals.sort(key=lambda interval: interval[2])
        self._ended.append(TracedSteps(self._id, tuple(self._intervals), tuple(self._steps)))
        self._id, self._base = 0, None

    def take(self) -> list[TracedSteps]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
