"""One trace at a time, and what becomes of it."""

import queue
import threading

import pytest

from crossdock.core import Busy, CrossdockError
from crossdock.core.messages import Trace, Traced
from crossdock.launch.traces import Traces


@pytest.fixture
def sent() -> queue.SimpleQueue:
    return queue.SimpleQueue()


def asked(traces, steps, timeout):
    """`(thread, answers)` of a record() under way."""
    answers: list = []

    def ask() -> None:
        try:
            answers.append(traces.record(steps, timeout))
        except CrossdockError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, answers


def test_ranks_answers_come_in_their_order_and_old_ones_are_ignored(sent):
    traces = Traces(2, sent.put)
    thread, answers = asked(traces, 5, 60)
    assert sent.get(timeout=60) == Trace(1, 5)
    with pytest.raises(Busy):
        traces.record(1, 1)
    first, second = Traced(0, 1, ((4, "experts", 1, 2),)), Traced(1, 1, ())
    for message in (second, Traced(0, 7, ()), first):
        traces.ended(message)
    thread.join(60)
    assert answers == [[first, second]] and sent.empty()


def test_a_trace_that_takes_too_long_is_given_up(sent, monkeypatch):
    monkeypatch.setattr("crossdock.launch.traces._GIVE_UP_S", 60)
    traces = Traces(2, sent.put)
    thread, answers = asked(traces, 5, 0.01)
    assert [sent.get(timeout=60) for _ in range(2)] == [Trace(1, 5), Trace(1, 0)]
    part = [Traced(rank, 1, ((4, "experts", 1, 2),)) for rank in range(2)]
    for message in part:
        traces.ended(message)
    thread.join(60)
    assert answers == [part]


def test_a_trace_ends_early_with_what_has_run_when_told_to(sent):
    traces = Traces(1, sent.put)
    traces.finish()  # of one that ended long ago
    thread, answers = asked(traces, 5, 600)
    assert sent.get(timeout=60) == Trace(1, 5)
    traces.finish()
    assert sent.get(timeout=60) == Trace(1, 0)
    part = Traced(0, 1, ((4, "experts", 1, 2),))
    traces.ended(part)
    thread.join(60)
    assert answers == [[part]]


def test_a_rank_that_does_not_answer_is_named(sent, monkeypatch):
    monkeypatch.setattr("crossdock.launch.traces._GIVE_UP_S", 0.01)
    traces = Traces(3, sent.put)
    traces_thread, answers = asked(traces, 5, 0.01)
    traces.ended(Traced(1, 1, ()))
    traces_thread.join(60)
    assert isinstance(answers[0], CrossdockError) and "[0" in str(answers[0])
    thread, answers = asked(traces, 1, 60)  # and the next one is asked for
    while sent.get(timeout=60) != Trace(2, 1):
        pass
    for rank in range(3):
        traces.ended(Traced(rank, 2, ()))
    thread.join(60)
    assert len(answers[0]) == 3


def test_an_engine_that_ends_ends_it(sent):
    traces = Traces(2, sent.put)
    thread, answers = asked(traces, 5, 60)
    sent.get(timeout=60)
    traces.close()
    thread.join(60)
    assert "ended" in str(answers[0])
