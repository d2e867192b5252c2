"""The engine's client where users misbehave: ids used again, listeners that raise, late calls."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from crossdock import LLM, SamplingParams
from crossdock.comm import SharedMemory, shm_bytes
from crossdock.core import CrossdockError, EngineConfig, RequestError, UserError
from crossdock.core.messages import Add, Report, Wake
from crossdock.launch import Update
from crossdock.launch.cluster import Cluster
from crossdock.launch.opened import Submission
from crossdock.scheduler import Router

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    model = Path(__file__).parents[2] / "checkpoints" / "storyteller"
    with LLM(str(model), ranks=2, device="cpu") as engine:
        yield engine


def test_an_id_used_again_gets_nothing_of_its_predecessor(llm: LLM) -> None:
    want = llm.generate([[7, 8, 9]], SHORT)[0].outputs[0].token_ids
    for round_ in range(20):
        running, ended, updates = threading.Event(), threading.Event(), []
        replaced = threading.Event()

        def hold(update: Update, running=running, replaced=replaced) -> None:
            running.set()
            assert replaced.wait(60)  # meanwhile the rank says more of it

        def listen(update: Update, updates=updates, ended=ended) -> None:
            updates.append(update)
            if update.finish_reason is not None:
                ended.set()

        llm.client.submit("same", [100 + round_] * 9, LONG, hold)
        assert running.wait(60)
        llm.client.abort("same")
        llm.client.submit("same", [7, 8, 9], SHORT, listen)
        replaced.set()
        assert ended.wait(60)
        assert tuple(t for u in updates for t in u.token_ids) == want


def test_a_listener_that_raises_loses_its_own_request_alone(llm: LLM) -> None:
    called = threading.Semaphore(0)

    def listen(update: Update) -> None:
        called.release()
        raise OSError("the listener is broken")

    names = ("a", "b", "c", "d")
    for name in names:
        llm.client.submit(name, [5, 6], LONG, listen)
    assert all(called.acquire(timeout=60) for _ in names)
    llm.client.snapshots(timeout=60)  # come in the same threads, so each has dropped its requests
    outputs = llm.generate(["One", "Two", "Three", "Four"], SHORT)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3] * 4
    assert llm.client.num_open() == 0 and llm.client.failure is None


def test_one_that_ends_its_thread_too(llm: LLM) -> None:
    for name in ("a", "b", "c", "d"):
        llm.client.submit(name, [5, 6], LONG, lambda update: sys.exit())
    assert llm.client._snapshots_within(60.0)[0]
    outputs = llm.generate(["One", "Two", "Three", "Four"], SHORT)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3] * 4


class Derived(SamplingParams):
    """Does not travel."""


def test_what_cannot_be_sent_is_refused_and_nothing_else_lost(llm: LLM) -> None:
    for name, params in ((5, SHORT), (None, SHORT), (b"a", SHORT)):
        with pytest.raises(RequestError, match="a request id is a text, got"):
            llm.client.submit(name, [5], params, print)
    for params in (Derived(), {"max_tokens": 2}, None):
        with pytest.raises(RequestError, match="expected SamplingParams, got"):
            llm.client.submit("a", [5], params, print)
    for steps in ("x", 1.5, 0, -1, object()):
        with pytest.raises(RequestError, match="steps must be a whole number from 1, got"):
            llm.client.traces.record(steps, 60)
    with pytest.raises(TypeError, match="object does not travel"):
        llm.client._cluster.broadcast(Add(object()))  # type: ignore[arg-type]
    assert llm.client.num_open() == 0
    assert len(llm.generate("Once", SHORT)[0].outputs[0].token_ids) == 3


def test_an_interrupt_leaves_no_rank_with_more_than_another() -> None:
    """Before any instruction of a message's way to its ranks."""
    cluster = Cluster(EngineConfig(model="m", ranks=3), print, print, {})
    cluster._outboxes = [queue.SimpleQueue() for _ in range(3)]

    def interrupted(before: int) -> bool:
        left = before

        def trace(frame: FrameType, event: str, _: object) -> Callable:
            nonlocal left
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            cluster.send(range(3), Wake(before))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    before = 0
    while interrupted(before):
        assert len({outbox.qsize() for outbox in cluster._outboxes}) == 1
        before += 1
    assert before > 10 and cluster._outboxes[0].qsize() > 0


def test_a_fork_is_told_that_the_engine_is_elsewhere(llm: LLM) -> None:
    """It has none of the threads, and would wait for ever."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            llm.generate("Once", SHORT)
        except CrossdockError as error:
            code = 0 if f"belongs to process {os.getppid()}" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(llm.generate("Once", SHORT)[0].outputs[0].token_ids) == 3


def test_integers_of_numpy_are_tokens_too(llm: LLM) -> None:
    want = llm.generate([[5, 6, 7]], LONG)[0].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=200, stop_token_ids=(np.int64(want[4]),))
    got = llm.generate([np.array([5, 6, 7])], stop)[0].outputs[0]
    assert got.token_ids == want[: want.index(want[4]) + 1]


def test_the_first_of_n_choices_draws_what_a_single_one_does(llm: LLM) -> None:
    one, many = (
        llm.generate("Once", SamplingParams(seed=-5, n=n, max_tokens=12, ignore_eos=True))[0]
        for n in (1, 3)
    )
    assert many.outputs[0].token_ids == one.outputs[0].token_ids


def test_a_batch_is_refused_whole_or_taken_whole(llm: LLM) -> None:
    good, bad = [5, 6], [5, llm.client.spec.vocab_size]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([good, good, bad], SHORT)
    assert llm.client.num_open() == 0
    with pytest.raises(RequestError, match=r"token ids are integers: 'float'"):
        llm.generate([good, [5, 6.0]], SHORT)

    def ignore(update: Update) -> None: ...

    twice = [Submission("twice", good, LONG, ignore)] * 2
    with pytest.raises(RequestError, match="'twice' is already in use"):
        llm.client.submit_all(twice)
    assert llm.client.num_open() == 0
    assert [len(o.outputs[0].token_ids) for o in llm.generate([good] * 5, SHORT)] == [3] * 5


def test_ranks_begin_a_batch_with_full_steps(storyteller: Path) -> None:
    """Beginning with the prompt that came first, each would need a step more. As many prompts as
    are there before any rank is woken."""
    prompts = [[100 + i] * 32 for i in range(8)]
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    settings = {"ranks": 2, "device": "cpu", "max_num_batched_tokens": 64}
    with LLM(str(storyteller), **settings) as engine:
        engine.generate(prompts, once)
        ranks = [rank.values for rank in engine.client.snapshots(timeout=60)]
    assert [sum(rank["overlap_steps"].values()) for rank in ranks] == [2, 2]


def test_an_answer_to_an_earlier_report_is_not_fresh(llm: LLM, monkeypatch) -> None:
    cluster = llm.client._cluster
    ask = cluster.broadcast
    monkeypatch.setattr(cluster, "broadcast", lambda report: ask(Report(report.number - 1)))
    fresh, _ = llm.client._snapshots_within(1.0)
    assert not fresh
    monkeypatch.undo()
    assert llm.client._snapshots_within(60.0)[0]


def test_an_idle_rank_counts_its_wait_in_the_lockstep(llm: LLM) -> None:
    llm.generate("Once", LONG)
    for snapshot in llm.client.snapshots(timeout=60):
        seconds, calls = snapshot.values["seconds"], snapshot.values["calls"]
        assert calls["wait"] == calls["agree"] + calls["dispatch"] + calls["combine"]
        assert seconds["agree"] <= seconds["wait"] <= seconds["step"]


def test_after_close_a_request_is_refused_and_open_ones_end(storyteller, monkeypatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(Router, "resize", lambda router, kv_pages: held.append(kv_pages))
    engine = LLM(str(storyteller), device="cpu")
    assert held == [engine.client.info[0]["kv_tokens"] // 16]  # what a prefix may be looked for in
    ends: list[str | None] = []
    params = SamplingParams(n=2, max_tokens=900, ignore_eos=True)
    engine.client.submit("open", [5], params, lambda u: ends.append(u.finish_reason))
    engine.close()
    assert ends[-2:] == ["abort", "abort"] and ends[:-2] == [None] * (len(ends) - 2)
    with pytest.raises(CrossdockError, match="closed"):
        engine.generate("Once", SHORT)


def test_ranks_that_were_started_end_if_a_later_one_cannot_be(
    storyteller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        started.append(popen(*args, **kwargs))
        return started[-1]

    memory = SharedMemory.create(shm_bytes(3))
    monkeypatch.setattr(subprocess, "Popen", start)
    config = EngineConfig(model=str(storyteller), ranks=3, device="cpu")
    cluster = Cluster(config, print, print, {"shm": memory.fd})
    with pytest.raises(OSError, match="open files"):
        cluster.start()
    assert [process.poll() for process in started] == [-9, -9]
    memory.close_fd()


def test_a_kv_cache_larger_than_the_memory_is_refused(storyteller: Path) -> None:
    with pytest.raises(UserError, match="GiB are free; lower kv_memory_gib"):
        LLM(str(storyteller), device="cpu", kv_memory_gib=2e5, max_num_seqs=10**8)
