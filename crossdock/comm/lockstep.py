"""The lockstep: every rank gives a few integers and gets everybody's. Knows not what they mean."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from crossdock.comm.board import STALE_S
from crossdock.comm.shared import LOCKSTEP_VALUES, LOCKSTEP_WORDS, SETS, SharedMemory, ShmLayout
from crossdock.comm.waiting import Waiter
from crossdock.core import RankLost


def _check(values: Sequence[int]) -> None:
    if len(values) > LOCKSTEP_VALUES:
        raise ValueError(f"an exchange takes {LOCKSTEP_VALUES} integers at most, got {len(values)}")


class LocalLockstep:
    """Of one rank."""

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        _check(values)
        return [tuple(values)]


class ShmLockstep:
    """Through shared memory. A rank writes its values, then the number of the exchange.

    Two sets suffice: whoever is in exchange n has seen all of n - 1, which its peers announced only
    after they had read n - 2, whose set n overwrites.
    """

    def __init__(self, rank: int, size: int, memory: SharedMemory, waiter: Waiter):
        self._rank, self._size, self._waiter = rank, size, waiter
        self._words = memory.words(ShmLayout(size).lockstep, SETS * size * LOCKSTEP_WORDS)
        self._count = 0

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """
        Raises:
            RankLost: a rank did not come within the deadline.
        """
        _check(values)
        count = self._count + 1
        words, size = self._words, self._size
        base = count % SETS * size * LOCKSTEP_WORDS
        mine = base + self._rank * LOCKSTEP_WORDS
        words[mine + 1] = len(values)
        words[mine + 2 : mine + 2 + len(values)] = memoryview(array("q", values))
        words[mine] = count
        flags = range(base, base + size * LOCKSTEP_WORDS, LOCKSTEP_WORDS)
        self._waiter.wait(
            lambda: all(words[at] == count for at in flags),
            lambda: [rank for rank, at in enumerate(flags) if words[at] != count],
            f"lockstep exchange {count}",
        )
        self._count = count
        return [tuple(words[at + 2 : at + 2 + words[at + 1]]) for at in flags]


class CollectiveLockstep:
    """Through a gloo process group, whose timeout is the deadline."""

    def __init__(self, group: Any, size: int, waiter: Waiter):
        self._group, self._size, self._waiter = group, size, waiter

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """
        Raises:
            RankLost: a rank did not come within the deadline, or its connection broke.
        """
        _check(values)
        mine = torch.tensor(
            [len(values), *values, *[0] * (LOCKSTEP_VALUES - len(values))], dtype=torch.int64
        )
        all_ = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            self._group.allgather([all_], [mine]).wait()
        except RuntimeError as error:
            raise broken(error, self._waiter, "lockstep") from error
        return [tuple(v[1 : 1 + v[0]]) for v in (t.tolist() for t in all_)]


def broken(error: RuntimeError, waiter: Waiter, what: str) -> RankLost:
    """A collective failed without saying for whom. On a shared board, suspects are those without a
    heartbeat and those seen elsewhere than this rank."""
    board = waiter.board
    others = [r for r in range(board.size) if r != board.rank] if board.shared else []
    gone = [r for r in others if board.heartbeat_age(r) > STALE_S]
    elsewhere = [r for r in others if board.where(r) != board.where(board.rank)]
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    lost = waiter.lost(gone or elsewhere, what)
    return RankLost(f"{lost} ({reason})", lost.rank)
