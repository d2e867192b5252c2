"""Timed steps on a made-up device, whose clock is known."""

from time import perf_counter

import pytest

from crossdock.core import Plan
from crossdock.metrics import Recorder, StepTimer, StepTiming

PLAN = Plan()


def layer(recorder, device, attention=0.003, dispatch=0.001, experts=0.004):
    with recorder.span("attention"):
        device.work(attention)
    device.work(0.0005)  # outside of any part
    both = recorder.span("dispatch", pieces=2)
    with both:
        device.work(dispatch / 4)
    with recorder.span("shared"):
        device.work(0.002)
    with both:
        device.work(dispatch * 3 / 4)
    with recorder.span("experts"):
        device.work(experts)
    with recorder.span("combine"):
        device.work(0.001)


def run(timer, recorder, device, number, gap=0.0, **times):
    device.work(gap)
    timer.begin(number, PLAN)
    layer(recorder, device, **times)
    timer.end()


def test_spans_of_a_device_cost_nothing_but_in_timed_steps(device):
    recorder = Recorder(on_device=True)
    timing = StepTiming(recorder, clock=device)
    layer(recorder, device)
    with timing.recording():
        layer(recorder, device, attention=0.005)
        layer(recorder, device)
    layer(recorder, device)
    device.finish()
    assert timing.read() == pytest.approx(
        {"attention": 0.008, "dispatch": 0.002, "shared": 0.004, "experts": 0.008, "combine": 0.002}
    )
    assert len([part for part, _ in timing.calls() if part == "dispatch"]) == 2
    assert len(timing.intervals(timing._events[0])) == 12  # each piece of a dispatch
    assert recorder.seconds == {} and recorder.marks is None
    made = len(timing._events)
    with timing.recording():
        layer(recorder, device)
    device.finish()
    assert timing.read()["attention"] == pytest.approx(0.003) and len(timing._events) == made


def test_a_captured_pass_is_read_after_every_replay(device):
    recorder = Recorder(on_device=True)
    timing, captured = StepTiming(recorder, external=True, clock=device), []
    device.capturing = captured
    with timing.recording():
        layer(recorder, device)
    device.capturing = None
    for slower in (1.0, 3.0):
        captured[:] = [w * slower if isinstance(w, float) else w for w in captured]
        device.replay(captured)
        device.finish()
        assert timing.read()["experts"] == pytest.approx(0.004 * slower)


def test_on_a_cpu_every_span_counts_once_whatever_its_pieces():
    recorder = Recorder()
    begin = perf_counter()
    both = recorder.span("dispatch", pieces=2)
    with both:
        pass
    assert recorder.calls == {}
    with both, recorder.span("router"):
        pass
    assert recorder.calls == {"dispatch": 1, "router": 1}
    assert recorder.histograms["dispatch"].sum == recorder.seconds["dispatch"]
    assert 0 < recorder.seconds["router"] < recorder.seconds["dispatch"] < perf_counter() - begin


def test_every_hundredth_step_is_timed_from_the_end_of_the_one_before(device):
    recorder = Recorder(on_device=True)
    timer = StepTimer(recorder, clock=device)
    for number in range(1, 221):
        run(timer, recorder, device, number, gap=0.006 if number == 110 else 0.002)
    device.finish()
    timer.collect()
    assert device.waits == 2  # at the beginnings of the two that follow one, and both had ended
    assert recorder.calls["step"] == 3 and recorder.calls["host_gap"] == 3
    assert recorder.seconds["step"] == pytest.approx(3 * 0.0115 + 0.002 + 0.006 + 0.002)
    assert recorder.seconds["host_gap"] == pytest.approx(0.002 + 0.006 + 0.002)
    assert recorder.seconds["dispatch"] == pytest.approx(0.003)
    assert recorder.histograms["dispatch"].counts[6] == 3  # 1 ms each


def test_a_step_after_a_pause_lasts_from_its_own_beginning(device):
    recorder = Recorder(on_device=True)
    timer = StepTimer(recorder, clock=device, every=10)
    run(timer, recorder, device, 1)  # the first of ten is timed, and nothing came before
    for number in (*range(2, 11), 12):
        run(timer, recorder, device, number, gap=5.0)
    device.finish()
    timer.collect()
    assert recorder.calls == {
        "step": 2, "attention": 2, "dispatch": 2, "shared": 2, "experts": 2, "combine": 2,
    }  # fmt: skip
    assert recorder.seconds["step"] == pytest.approx(2 * 0.0115)


def test_reading_waits_for_no_device(device):
    recorder = Recorder(on_device=True)
    timer = StepTimer(recorder, clock=device, every=10)
    run(timer, recorder, device, 1)
    timer.collect()
    assert recorder.calls == {} and device.waits == 0
    device.finish()
    timer.collect()
    assert recorder.calls["step"] == 1 and device.waits == 0


def test_a_graph_is_not_replayed_before_its_last_times_are_read(device):
    recorder = Recorder(on_device=True)
    timer = StepTimer(recorder, clock=device)
    timing, captured = StepTiming(recorder, external=True, clock=device), []
    device.capturing = captured
    with timing.recording():
        layer(recorder, device)
    device.capturing = None
    timer.trace(1, 3)
    timer.heard([timer.words()])
    for number in (1, 2, 3):
        timer.begin(number, PLAN)
        assert timer.timed
        timer.replays(timing)
        device.replay(captured)
        with recorder.span("sample"):  # eagerly, after the graph
            device.work(0.01)
        timer.end()
        assert not timer.timed
    (trace,) = timer.traced()
    assert recorder.calls["experts"] == recorder.calls["sample"] == recorder.calls["step"] == 3
    assert recorder.seconds["step"] == pytest.approx(3 * 0.0215)
    steps = {(step, part) for step, part, *_ in trace.intervals}
    assert {(n, part) for n in (1, 2, 3) for part in ("device", "experts", "sample")} <= steps
    experts = [(s, e) for _, part, s, e in trace.intervals if part == "experts"]
    assert [e - s for s, e in experts] == pytest.approx([4e6] * 3, abs=1000)
    assert experts[1][0] - experts[0][0] == pytest.approx(21.5e6, abs=1000)
    assert not timer.traced()


def test_ranks_learn_what_they_waited_from_the_least_exchange(device):
    recorders = [Recorder(on_device=True) for _ in range(3)]
    timers = [StepTimer(recorder, clock=device, every=10) for recorder in recorders]
    for number in range(1, 13):
        for rank, (timer, recorder) in enumerate(zip(timers, recorders, strict=True)):
            run(timer, recorder, device, number, dispatch=0.001 + 0.002 * rank)
        device.finish()
        words = [timer.words() for timer in timers]
        for timer in timers:
            timer.heard(words)
    for rank, recorder in enumerate(recorders):
        assert recorder.calls["wait"] == 1  # of the first; that of the second is not told yet
        assert recorder.seconds["wait"] == pytest.approx(0.002 * rank, abs=1e-8)


def test_a_trace_begins_once_all_are_asked_and_can_be_given_up():
    recorders = [Recorder() for _ in range(2)]
    timers = [StepTimer(recorder) for recorder in recorders]

    def step(number):
        words = [timer.words() for timer in timers]
        for timer, recorder in zip(timers, recorders, strict=True):
            with recorder.host("step"):
                timer.heard(words)
                timer.begin(number, PLAN)
                with recorder.span("attention"):
                    recorder.observe("wait", 1e-7)
                timer.end()

    timers[0].trace(7, 2)
    step(1)
    timers[1].trace(7, 2)
    for number in (2, 3, 4):
        step(number)
    for timer in timers:
        (trace,) = timer.traced()
        assert trace.id == 7
        seen = [(step, part) for step, part, *_ in trace.intervals]
        assert set(seen) == {(n, p) for n in (2, 3) for p in ("step", "attention", "wait")}
        assert all(start <= end for *_, start, end in trace.intervals)
    timers[0].trace(8, 5)
    timers[0].trace(8, 0)  # given up before the other was asked
    timers[1].trace(8, 5)
    step(5)
    assert [t.steps for t in timers[0].traced()] == [()] and not timers[1].traced()
    timers[1].trace(8, 0)
    assert [t.id for t in timers[1].traced()] == [8]
    for timer in timers:
        timer.trace(9, 50)
    step(6)
    step(7)
    timers[0].trace(9, 0)
    (trace,) = timers[0].traced()
    assert {step for step, *_ in trace.intervals} == {6, 7}
    assert recorders[0].log is None and recorders[1].log is not None
