"""Timed steps by real device events, eagerly and inside a CUDA graph."""

from itertools import pairwise

import pytest
import torch

from crossdock.core import Plan
from crossdock.metrics import CudaClock, Recorder, StepTimer, StepTiming

pytestmark = pytest.mark.gpu


class Work:
    """A forward pass of two parts, the second of which is four times the first."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self()
        torch.cuda.synchronize()

    def __call__(self) -> None:
        with self.recorder.span("attention"):
            self.x @ self.x
        with self.recorder.span("experts"):
            for _ in range(4):
                self.x @ self.x


def check(parts: dict[str, float], whole_ms: float) -> None:
    assert 2.5 < parts["experts"] / parts["attention"] < 6
    assert 0.8 * whole_ms < sum(parts.values()) * 1e3 <= whole_ms


def measured(run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_eagerly():
    recorder = Recorder(on_device=True)
    work, timing = Work(recorder), StepTiming(recorder)

    def run():
        with timing.recording():
            work()

    for _ in range(3):  # its events are used again
        whole_ms = measured(run)
        check(timing.read(), whole_ms)


def test_in_every_replay_of_a_graph():
    recorder = Recorder(on_device=True)
    work, timing = Work(recorder), StepTiming(recorder, external=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), timing.recording():
        work()
    seen = []
    for _ in range(3):
        whole_ms = measured(graph.replay)
        check(timing.read(), whole_ms)
        seen.append(timing.read())
    assert seen[0] != seen[1] or seen[1] != seen[2]


def test_steps_of_a_graph_and_what_follows_it_on_one_timeline():
    recorder = Recorder(on_device=True)
    recorder.rows_LS = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    work, timing = Work(recorder), StepTiming(recorder, external=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), timing.recording():
        work()
    timer = StepTimer(recorder, clock=CudaClock())
    timer.trace(1, 4)
    timer.heard([timer.words()])
    for number in range(1, 5):
        timer.begin(number, Plan())
        timer.replays(timing)
        graph.replay()
        with recorder.span("sample"):
            work.x @ work.x
        timer.end()
    (trace,) = timer.traced()
    assert recorder.calls["step"] == recorder.calls["experts"] == recorder.calls["sample"] == 4
    assert recorder.calls["host_gap"] == 3
    steps = [(s, e) for _, part, s, e in trace.intervals if part == "device"]
    assert len(steps) == 4 and all(a[1] <= b[0] + 1000 for a, b in pairwise(steps))
    for step, part, start, end in trace.intervals:
        whole = steps[step - 1]
        assert whole[0] - 1000 <= start <= end <= whole[1] + 1000, part  # ns, of float ms
    inside = sum(recorder.seconds[part] for part in ("attention", "experts", "sample"))
    assert inside + recorder.seconds["host_gap"] <= recorder.seconds["step"] * 1.001


def test_a_step_that_is_not_timed_records_nothing(monkeypatch):
    recorder = Recorder(on_device=True)
    work, timer = Work(recorder), StepTimer(recorder, clock=CudaClock())
    made = []
    event = CudaClock.event
    monkeypatch.setattr(
        CudaClock, "event", lambda self, external=False: made.append(1) or event(self, external)
    )
    for number in range(1, 9):
        timer.begin(number, Plan())
        work()
        timer.end()
    assert not made and recorder.seconds == {}
    timer.begin(9, Plan())
    timer.end()
    assert len(made) == 1  # where the tenth begins
