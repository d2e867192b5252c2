import os
import signal

import numpy as np
import pytest


def expected(size, rounds):
    return [[(r, n, *range(-n % 7)) if n % 5 else () for r in range(size)] for n in range(rounds)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_everyone_gets_everybodys_values(pool, size):
    rounds = 300
    for got in pool.call(range(size), "lockstep", size, rounds):
        assert got == expected(size, rounds)


def test_without_shared_memory(make_pool):
    pool = make_pool(3, (3,), shared=False)
    for got in pool.call(range(3), "lockstep", 3, 10):
        assert got == expected(3, 10)


def lost(pool, failed, ranks):
    """(message, rank named) by each of `ranks`, all of which must give up."""
    said = []
    for rank in ranks:
        with pytest.raises(failed) as caught:
            pool.answer(rank)
        kind, message, named = caught.value.args
        assert kind == "RankLost"
        said.append((message, named))
    return said


@pytest.mark.parametrize("what", ["lockstep", "dispatch", "combine", "collective"])
def test_a_stopped_rank_is_named(make_pool, failed, what):
    pool = make_pool(3, (3,), deadline_s=6.0)
    kind = "collective" if what == "collective" else "shm"
    shape = {"max_tokens": 4, "hidden": 8, "top_k": 1, "slots_per_rank": 1, "dtype": "float32"}
    pool.call(range(3), "build", 3, [kind], per_expert=False, **shape)
    pool.call(range(3), "lockstep", 3, 2)
    pool.call(range(3), "enter", 3, "dispatch", 5, 41)
    pool.call([1], "enter", 3, "attention", -1, 40)
    step = (np.ones((2, 8), np.float32), np.array([[0], [1]]), np.ones((2, 1), np.float32))
    others = (0, 2)
    os.kill(pool.processes[1].pid, signal.SIGSTOP)
    for rank in others:
        if what == "lockstep":
            pool.send(rank, "lockstep", 3, 1)
        elif what == "combine":
            pool.send(rank, "combine_without", 1, np.arange(3), step)
        else:
            pool.send(rank, "run", np.arange(3), [step], 1)
    for message, named in lost(pool, failed, others):
        assert named == 1
        assert "rank 1, last seen in attention, step 40" in message
        assert "stopped or gone" in message
