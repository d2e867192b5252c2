"""Which steps are timed part by part, and when their times are read. Knows no engine."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crossdock.core import Plan
from crossdock.core.step_work import RankWork
from crossdock.metrics.clock import Clock, Event, HostClock
from crossdock.metrics.recorder import Recorder
from crossdock.metrics.step_timing import StepTiming
from crossdock.metrics.tracer import TracedSteps, Tracer

EVERY = 100
"""Steps that run, from one that is timed to the next; the tenth is the first."""
EXCHANGE = ("dispatch", "combine")
NOTHING_TOLD = (-1, 0)


@dataclass(eq=False)
class _Step:
    """One that is timed. `before`: the end of the step before, where that came directly before it;
    `rows_LS`: what experts had worked on before it, then (`slots`) how many of them it used."""

    number: int
    plan: Plan
    traced: bool
    rows_LS: Any
    before: Event | None
    start: Event
    end: Event | None = None
    done: Event | None = None
    slots: Any = 0
    timings: list[StepTiming] = field(default_factory=list)


class StepTimer:
    """Of one rank; all ranks call it alike, so that they time the same steps:

        words = timer.words()               # into the lockstep, beside the engine's own
        timer.heard([...])                  # what it gave back, by rank
        timer.begin(number, plan)           # before the first launch of a step that runs
        if timer.timed:                     # a graph with events inside takes the plain one's place
            timer.replays(timing)           # before it is replayed
        timer.end()                         # after the last launch
        timer.collect()                     # now and then; never waits

    Every step counts in the counter "steps". The tenth and then every hundredth is timed: it feeds
    the counters "timed_ns", "timed_flops" and "timed_bytes" (of `work`), and on a device the
    recorder's parts; on a CPU those are fed by every step. A timed step lasts from the end of the
    step before to its own, on the device's own timeline; what of this the device idled before its
    first kernel is "host_gap". Where no step came directly before, it lasts from its own beginning.

    "wait" on a device is what dispatch and combine took beyond those of the rank for which they
    took least in the same step, which ranks tell each other one timed step late. Ranks that are
    slow in different layers wait for each other more than this sees: it is a lower bound.

    A traced step is a timed one. Its times are read before the next graph with events is replayed,
    so that while a trace lasts the host cannot run ahead of a device.
    """

    def __init__(
        self,
        recorder: Recorder,
        work: RankWork | None = None,
        clock: Clock | None = None,
        every: int = EVERY,
    ):
        self._recorder, self._work, self._every = recorder, work, every
        self._clock: Clock = clock or HostClock()
        self._tracer = Tracer(recorder, self._clock)
        self._count, self._last = 0, -1
        self._step: _Step | None = None
        self._end: Event | None = None
        self._pending: deque[_Step] = deque()
        self._free: list[StepTiming] = []
        self._recording: StepTiming | None = None
        # (number, ns of dispatch and combine) of timed steps: read last, and told to the others.
        self._read, self._told, self._unheard = NOTHING_TOLD, NOTHING_TOLD, False

    # -- around a step ---------------------------------------------------------------------------

    @property
    def timed(self) -> bool:
        """Whether the step that runs now is timed by events of a device."""
        return self._recording is not None

    def begin(self, number: int, plan: Plan) -> None:
        """
        Args:
            number: of the step; one more than the last one's if it follows directly.
            plan: what this rank runs.
        """
        self._count += 1
        self._recorder.add("steps")
        follows, self._last = number == self._last + 1, number
        if not (self._due(self._count) or self._tracer.active):
            return
        recorder, rows, traced = self._recorder, self._recorder.rows_LS, self._tracer.active
        if not traced:
            self.collect(wait=True)
        self._told, self._unheard = self._read, True
        before = self._end if follows else None
        rows = None if rows is None else rows.clone()
        self._step = _Step(number, plan, traced, rows, before, self._event())
        if self._clock.on_device:
            timing = self._free.pop() if self._free else StepTiming(recorder, clock=self._clock)
            self._step.timings.append(timing)
            timing.start()
            self._recording = timing

    def replays(self, timing: StepTiming) -> None:
        """Before a graph with events inside is replayed: waits until its last times are read."""
        assert self._step is not None, "belongs between begin and end of a timed step"
        if any(timing in step.timings for step in self._pending):
            self.collect(wait=True)
        self._step.timings.append(timing)

    def end(self) -> None:
        step = self._step
        if step is None:
            self._end = self._event() if self._due(self._count + 1) else None
            return
        self._step = None
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._end = step.end = step.done = self._event()
        if step.rows_LS is not None:
            step.slots = self._clock.copy((self._recorder.rows_LS > step.rows_LS).sum())
            step.done = self._event()
        self._pending.append(step)
        if step.traced:
            self._tracer.ran()
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Reads the times of steps that the device is past."""
        while self._pending:
            done = self._pending[0].done
            assert done is not None
            if wait:
                done.synchronize()
            elif not done.query():
                return
            self._take(self._pending.popleft())

    def _due(self, count: int) -> bool:
        return count % self._every == self._every // 10

    def _event(self) -> Event:
        event = self._clock.event()
        event.record()
        return event

    def _take(self, step: _Step) -> None:
        assert step.end is not None
        recorder, on_device = self._recorder, self._clock.on_device
        seconds = (step.before or step.start).elapsed_time(step.end) / 1e3
        flops = nbytes = 0
        if self._work is not None:
            flops = self._work.flops(step.plan)
            nbytes = self._work.bytes(step.plan, int(step.slots))
            recorder.add("timed_ns", int(seconds * 1e9))
            recorder.add("timed_flops", flops)
            recorder.add("timed_bytes", nbytes)
        if step.traced:
            tokens, decodes = step.plan.num_tokens, step.plan.num_decodes
            self._tracer.size(step.number, tokens, decodes, flops, nbytes)
        if not on_device:
            return
        recorder.count("step", seconds)
        if step.before is not None:
            recorder.count("host_gap", step.before.elapsed_time(step.start) / 1e3)
        exchange = 0.0
        for part, took in (call for timing in step.timings for call in timing.calls()):
            recorder.count(part, took)
            exchange += took if part in EXCHANGE else 0.0
        self._read = (step.number, int(exchange * 1e9))
        base = self._tracer.base
        if step.traced and base is not None:
            spans = [span for timing in step.timings for span in timing.intervals(base)]
            at = base.elapsed_time(step.start) / 1e3, base.elapsed_time(step.end) / 1e3
            self._tracer.add(step.number, [("device", *at), *spans])
        self._free.append(step.timings[0])

    # -- what ranks tell each other --------------------------------------------------------------

    def words(self) -> tuple[int, ...]:
        return (*self._told, self._tracer.word)

    def heard(self, words_R: Sequence[Sequence[int]]) -> None:
        """`words_R`: of all ranks, in this step; before `begin`."""
        if self._unheard and len(words_R) > 1:
            self._unheard = False
            number, mine = self._told
            if number >= 0 and all(words[0] == number for words in words_R):
                self._recorder.count("wait", (mine - min(words[1] for words in words_R)) / 1e9)
        self._tracer.heard([words[2] for words in words_R])

    # -- traces ----------------------------------------------------------------------------------

    def trace(self, id: int, steps: int) -> None:
        """As `Tracer.ask`."""
        self._tracer.ask(id, steps)

    def traced(self) -> list[TracedSteps]:
        """Traces that have ended since the last call; between steps."""
        if self._tracer.complete:
            self.collect(wait=True)
            self._tracer.finish()
        return self._tracer.take()
