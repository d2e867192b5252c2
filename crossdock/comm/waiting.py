"""Waiting for other ranks on the CPU: give the core away, since the awaited may need it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from crossdock.comm.board import Board
from crossdock.core import RankLost

_YIELD_S = 5e-3
_SLEEP_S = 100e-6
_LOOK_EVERY = 32
"""Yields between two looks at the clock."""


@dataclass(frozen=True)
class Waiter:
    board: Board
    deadline_s: float

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: str) -> float:
        """Returns once `ready()`; seconds waited.

        Raises:
            RankLost: the deadline passed; names who of `missing()` was last heard of longest ago.
        """
        if ready():
            return 0.0
        start = time.perf_counter()
        spins = 0
        while not ready():
            os.sched_yield()
            spins += 1
            if spins % _LOOK_EVERY:
                continue
            waited = time.perf_counter() - start
            if waited > _YIELD_S:
                if waited > self.deadline_s:
                    raise self.lost(missing(), f"{what} within {self.deadline_s:g} s")
                time.sleep(_SLEEP_S)
                spins = _LOOK_EVERY - 1  # look at the clock after every sleep from now on
        return time.perf_counter() - start

    def lost(self, missing: list[int], what: str) -> RankLost:
        ranks = sorted(missing, key=self.board.heartbeat_age, reverse=True)
        if not ranks:
            return RankLost(f"a rank did not come to {what}")
        others = f"; also missing: {ranks[1:]}" if len(ranks) > 1 else ""
        said = self.board.describe(ranks[0])
        return RankLost(f"did not come to {what}: {said}{others}", ranks[0])
