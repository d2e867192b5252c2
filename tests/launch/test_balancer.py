"""What rebalances record, on a scripted engine; and that a real one balances itself."""

import logging
import select
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from crossdock import LLM, SamplingParams
from crossdock.balance import linear_placement, parse_loads
from crossdock.control import History, Question, Reading, Window, decide
from crossdock.core import Busy, ConfigError, CrossdockError, EngineConfig
from crossdock.core.messages import Rebalanced
from crossdock.launch import rebalance_planner
from crossdock.launch.rebalance import Balancer
from crossdock.launch.rebalance_loads import LoadRecording
from crossdock.launch.rebalance_planner import decide_elsewhere, decode, encode
from crossdock.launch.rebalance_ranks import Moves

LOAD_LE = np.array([[900, 800, 10, 10, 10, 10], [10, 900, 10, 10, 10, 10]])


class FakeMover:
    """Two ranks of three slots; every reading adds `load_LE` and a second of steps."""

    def __init__(self, mode="auto", **settings):
        self.config = EngineConfig(
            model="m", ranks=2, rebalance=mode, rebalance_interval_s=100, **settings
        )
        self.placement = linear_placement(2, 6, 2)
        self.expert_bytes, self.now, self.load_LE = 1000, 0.0, LOAD_LE
        self.read_rows = 0.0
        self.expert_LE = np.zeros((2, 6), dtype=np.int64)
        self.rank_LR = np.zeros((2, 2), dtype=np.int64)
        self.ends = self.succeed

    def reading(self):
        self.now += 1.0
        self.expert_LE = self.expert_LE + self.load_LE
        slots_LP = np.take_along_axis(self.load_LE, self.placement.slot_expert_LP, axis=1)
        self.rank_LR = self.rank_LR + slots_LP.reshape(2, 2, 3).sum(axis=2)
        steps, seconds = int(self.now) * 10, np.full(2, self.now)
        return Reading(self.now, self.expert_LE, self.rank_LR, steps, seconds, seconds / 2)

    def rebalance(self, slot_expert_LP, timeout=None):
        return self.ends(slot_expert_LP)

    def succeed(self, slot_expert_LP):
        moves = Moves(self.placement)
        message, result = moves.begin(slot_expert_LP, 1)
        for rank in range(2):
            moves.ended(Rebalanced(rank, message.epoch, 2, 500 * rank, 0.25))
        self.placement = moves.placement
        return result.result(0)


def balancer(mover):
    made = Balancer(mover, lambda: mover.now, decide)
    made.begin_window()
    return made


def test_a_move_is_made_and_judged_by_the_next_window():
    mover = FakeMover()
    made = balancer(mover)
    outcome = made.look()
    assert outcome.result == "moved" and outcome.moved_bytes == 500 and outcome.seconds == 0.25
    assert np.array_equal(mover.placement.slot_expert_LP, outcome.plan.slot_expert_LP)
    assert made.totals.predicted_gain == outcome.plan.gain > 0
    assert made.totals.measured_gain is None
    assert made.look().result == "unchanged"
    assert made.totals.measured_gain == pytest.approx(outcome.plan.gain)
    assert made.totals.results == {"moved": 1, "unchanged": 1, "failed": 0}
    assert made.totals.seconds.counts[3] == 1 and made.totals.moved_bytes == 500


def test_without_load_the_window_stays_open():
    mover = FakeMover()
    made = balancer(mover)
    mover.load_LE = np.minimum(LOAD_LE, 3)
    assert [made.look() for _ in range(4)] == [None] * 4
    mover.load_LE = LOAD_LE
    assert made.look().result == "moved"


def test_a_failure_is_counted_said_and_leaves_the_placement(caplog):
    mover = FakeMover()
    made, before = balancer(mover), mover.placement
    mover.ends = lambda slots: Rebalanced(0, 1, 0, 10, 0.1, "layer 0: a copy arrived damaged")
    with caplog.at_level(logging.ERROR):
        outcome = made.look()
    assert outcome.result == "failed" and "arrived damaged" in outcome.why
    assert "the old placement goes on serving" in caplog.text and "arrived damaged" in caplog.text
    assert mover.placement is before and made.totals.results["failed"] == 1

    def lost(slots):
        raise CrossdockError("rank 1 is gone")

    mover.ends = lost
    with pytest.raises(CrossdockError, match="gone"):
        made.rebalance()
    assert made.totals.results["failed"] == 2
    mover.ends = mover.succeed
    assert made.rebalance().result == "moved"  # asked for, the backoff does not matter


def test_one_at_a_time_and_only_where_it_is_on():
    mover = FakeMover("manual")
    made = balancer(mover)
    begun, go = threading.Event(), threading.Event()

    def wait(slots):
        begun.set()
        assert go.wait(30)
        return mover.succeed(slots)

    mover.ends = wait
    thread = threading.Thread(target=made.rebalance)
    thread.start()
    assert begun.wait(30)
    with pytest.raises(Busy, match="being planned or made already"):
        made.rebalance()
    assert made.look() is None
    go.set()
    thread.join(30)
    assert made.look().why == 'rebalance = "manual"' and made.totals.results["moved"] == 1
    assert made.rebalance("sticky").result == "unchanged"
    with pytest.raises(ConfigError, match='rebalance = "manual" or "auto"'):
        balancer(FakeMover("off")).rebalance()
    idle = FakeMover("manual")
    idle.load_LE = np.zeros_like(LOAD_LE)
    with pytest.raises(ConfigError, match="no tokens were routed yet"):
        balancer(idle).rebalance()


def test_after_a_move_there_is_nothing_to_plan_from():
    mover = FakeMover("manual")
    made = balancer(mover)
    assert made.rebalance().result == "moved"
    mover.load_LE = np.zeros_like(LOAD_LE)
    with pytest.raises(ConfigError, match="no tokens were routed since the last move to plan from"):
        made.rebalance()


def test_the_thread_looks_by_itself_until_closed(caplog):
    mover, moved = FakeMover(), threading.Event()
    mover.config = replace(mover.config, rebalance_interval_s=1e-3)
    answers = iter([CrossdockError("a rank did not answer"), RuntimeError("a policy failed")])

    def rebalance(slots):
        for error in answers:  # neither ends the thread
            raise error
        moved.set()
        return mover.succeed(slots)

    mover.ends = rebalance
    made = Balancer(
        mover, lambda: mover.now * 1e3, decide
    )  # what is an interval for it is none for us
    made.start()
    assert moved.wait(30)
    made.close()
    assert "no look at the loads: a rank did not answer" in caplog.text
    assert "planning failed" in caplog.text and "a policy failed" in caplog.text
    off = FakeMover("off")
    Balancer(off).start()
    assert off.now == 0  # nobody asked the ranks


def test_a_placement_is_taken_over_as_far_as_it_got():
    now = linear_placement(3, 6, 2)
    target = now.slot_expert_LP.copy()
    target[[0, 2]] = target[[0, 2]][:, ::-1]
    moves = Moves(now)
    _, ending = moves.begin(target, 1)
    with pytest.raises(Busy):
        moves.begin(target, 2)
    moves.ended(Rebalanced(1, 1, 1, 7, 0.1, "broken"))
    assert moves.under_way and moves.missing() == [0]
    moves.ended(Rebalanced(0, 1, 1, 5, 0.2, "broken"))
    assert not moves.under_way
    assert np.array_equal(moves.placement.slot_expert_LP[0], target[0])
    assert np.array_equal(moves.placement.slot_expert_LP[1:], now.slot_expert_LP[1:])
    moves.begin(target, 2)  # by somebody else, before the first has looked
    result = ending.result(0)
    assert (result.error, result.layers, result.moved_bytes, result.seconds) == (
        "broken", 1, 12, 0.2,
    )  # fmt: skip


def test_what_is_no_placement_begins_no_move():
    now = linear_placement(3, 6, 2)
    moves, slots_LP = Moves(now), now.slot_expert_LP
    for wrong in (slots_LP[0], slots_LP[:2], slots_LP[None], slots_LP + 0.5):
        with pytest.raises(ConfigError, match=r"expected \(layers, slots\) = \(3, 6\), integers"):
            moves.begin(wrong, 1)
    assert not moves.under_way
    target = slots_LP[:, ::-1].copy()
    message, _ = moves.begin(target, 1)
    want = target.copy()
    target[:] = 0  # the caller's own by now
    for rank in range(2):
        moves.ended(Rebalanced(rank, message.epoch, 3, 1, 0.1))
    assert np.array_equal(moves.placement.slot_expert_LP, want)


def test_another_process_decides_alike():
    mover = FakeMover()
    window = Window.between(mover.reading(), mover.reading())
    window = replace(window, sizes_N=(0, 0, 3, 0, 2))
    for policy in (None, "eplb"):
        question = Question(
            window, mover.placement, mover.config, History(), 1000, mover.now, policy, 2.5
        )
        here, there = decide(question), decide_elsewhere(question, threading.Event())
        assert here.move is there.move is True and here.why == there.why
        assert np.array_equal(here.plan.slot_expert_LP, there.plan.slot_expert_LP)
        for name in (
            "policy",
            "imbalance_before",
            "imbalance_after",
            "moves",
            "gain",
            "left",
            "cost_s",
        ):
            assert getattr(here.plan, name) == getattr(there.plan, name), name
    again = decode(encode(question))
    assert again.config == question.config and again.history == question.history
    assert again.window.sizes_N == window.sizes_N and again.read_rows == 2.5
    assert again.placement.slot_expert_LP.dtype == np.int64
    late = replace(question, policy=None, history=History(moved_at=mover.now))
    answer = decide_elsewhere(late, threading.Event())
    assert (answer.move, answer.why, answer.plan) == (False, decide(late).why, None)
    with pytest.raises(ConfigError, match="policy 'best'"):
        decide_elsewhere(replace(question, policy="best"), threading.Event())


def test_another_process_reads_all_that_a_large_model_asks(monkeypatch):
    monkeypatch.setattr(rebalance_planner, "_LOOK_S", 0.001)
    monkeypatch.setattr(rebalance_planner, "_TIMEOUT_S", 60.0)
    mover, placement = FakeMover(), linear_placement(58, 256, 2)
    load_LE = np.random.default_rng().integers(1, 10**6, (58, 256))
    window = Window.between(mover.reading(), mover.reading())
    window = replace(window, load_LE=load_LE, rank_LR=load_LE.reshape(58, 2, 128).sum(axis=2))
    question = Question(window, placement, mover.config, History(), 1000, 2.0, "eplb", 2.5)
    assert len(encode(question)) > 1 << 17  # more than a pipe holds
    there = decide_elsewhere(question, threading.Event())
    assert np.array_equal(there.plan.slot_expert_LP, decide(question).plan.slot_expert_LP)


def test_a_closed_engine_leaves_no_planning_process(monkeypatch):
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        made.close()
        return started[-1]

    mover = FakeMover()
    made = Balancer(mover, lambda: mover.now)
    made.begin_window()
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(CrossdockError, match="closed"):
        made.rebalance()
    assert [process.poll() for process in started] == [-9]


def test_a_planning_process_ends_with_its_parent():
    # Killed here; but a closed engine's process, too, may end before a plan is made.
    dies = """
import os, subprocess, sys
plan = [sys.executable, "-m", "crossdock.launch.rebalance_planner", str(os.getpid())]
subprocess.Popen(plan)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", dies]
    # No question comes on stdin, for which it would wait for ever; stdout ends when it does.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.wait(60) == -9
        assert select.select([parent.stdout], [], [], 60)[0] and parent.stdout.read() == b""


def test_a_recording_of_windows():
    mover = FakeMover("off")
    recording = LoadRecording(mover)
    with pytest.raises(ConfigError, match="was not started"):
        recording.dump()
    recording.start()
    assert recording.state() == {"recording": True, "windows": 0}
    assert len(recording.dump()["windows"]) == 1
    mover.load_LE = np.zeros_like(LOAD_LE)
    recording.dump()
    mover.load_LE = 2 * LOAD_LE
    document = recording.dump()
    loads = parse_loads(document, "dump")
    assert np.array_equal(loads.load_WLE, [LOAD_LE, 2 * LOAD_LE])
    assert loads.steps_W.tolist() == [10, 10] and loads.expert_bytes == 1000
    assert np.array_equal(loads.placement_LP, mover.placement.slot_expert_LP)
    recording.stop()
    assert recording.state() == {"recording": False, "windows": 3}
    recording.reset()
    with pytest.raises(ConfigError, match="was not started"):
        recording.dump()


def test_closing_ends_a_move_that_waits(storyteller):
    """Nobody is left waiting for ranks that are gone."""
    said = []
    with LLM(str(storyteller), ranks=2, device="cpu", rebalance="manual") as llm:
        client = llm.client
        waiting = threading.Event()
        wait_for = client._changed.wait_for

        def wait(predicate, timeout=None):
            waiting.set()
            return wait_for(predicate, timeout)

        client._changed.wait_for = wait
        client._cluster.broadcast = lambda message: None  # the ranks never hear of it

        def move():
            try:
                client.rebalance(client.placement.slot_expert_LP[:, ::-1])
            except CrossdockError as error:
                said.append(str(error))

        thread = threading.Thread(target=move)
        thread.start()
        assert waiting.wait(30)
        del client._cluster.broadcast
        with pytest.raises(Busy):
            client.rebalance(client.placement.slot_expert_LP)
    thread.join(30)
    assert said == ["the engine is closed"]


def test_an_engine_that_starts_badly_balances_itself(storyteller):
    prompts = [f"Once upon a time there was a {w}" for w in ("dog", "cat", "fox", "girl")] * 2
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"rebalance": "auto", "rebalance_interval_s": 1e6, "prefix_caching": False}
    with LLM(str(storyteller), ranks=2, device="cpu", **settings) as llm:
        client = llm.client
        client.recording.start()
        llm.generate(prompts, params)
        loads = parse_loads(client.recording.dump(), "dump")
        rows = sum(len(client.tokenizer.encode(p)) + 23 for p in prompts)
        assert (loads.load_WLE[0].sum(axis=1) == rows * client.spec.moe.top_k).all()
        popular = np.argsort(-loads.load_WLE[0], axis=1, kind="stable")
        assert client.rebalance(popular, 60).error is None  # the popular half on rank 0
        client.balancer.begin_window()
        llm.generate(prompts, params)
        outcome = client.balancer.look()
        assert outcome.result == "moved" and outcome.plan.gain > 0.2
        assert np.array_equal(client.placement.slot_expert_LP, outcome.plan.slot_expert_LP)
        llm.generate(prompts, params)
        client.balancer.look()
        # Without replicas and with the same tokens, what was predicted is what happens.
        assert client.balancer.totals.measured_gain == pytest.approx(outcome.plan.gain, abs=0.01)
