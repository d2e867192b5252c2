"""The best placement with equal shares, by exhaustion: the oracle for small cases."""

from collections.abc import Iterator
from math import comb

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem
from crossdock.balance.eplb import eplb
from crossdock.balance.score import rank_load
from crossdock.core import CapacityError

MOST_COUNTS = 100_000
"""Ways to deal the slots out to the experts."""
MOST_NODES = 2_000_000
"""Partial packings looked at, per layer."""


def optimal(problem: Problem) -> Answer:
    """The least load of the fullest rank that equal shares allow. Slots may stay empty and copies
    of an expert may share a rank, so that no placement with equal shares is better.

    Raises:
        ConfigError: an invalid problem.
        CapacityError: too large a case.
    """
    check_problem(problem)
    experts, slots = problem.load_LE.shape[1], problem.num_ranks * problem.slots_per_rank
    ways = comb(slots, experts)
    if ways > MOST_COUNTS:
        raise CapacityError(
            f"optimal: {slots} slots can be dealt out to {experts} experts in {ways:.1e} ways, "
            f"more than {MOST_COUNTS}: take fewer slots or experts, or another policy"
        )
    greedy = eplb(problem)
    most_L = rank_load(problem.load_LE, greedy, problem.num_ranks).max(axis=1)
    rows = [
        _best(load_E.astype(float), float(most), row_P, problem)
        for load_E, most, row_P in zip(problem.load_LE, most_L, greedy.slot_expert_LP, strict=True)
    ]
    return Answer(np.array(rows))


def _best(load_E: np.ndarray, most: float, start_P: np.ndarray, problem: Problem) -> np.ndarray:
    """Betters `start_P`, whose fullest rank has `most`, until nothing does."""
    by_load = np.argsort(-load_E, kind="stable")
    search = _Search(load_E[by_load].tolist(), most, problem.num_ranks, problem.slots_per_rank)
    best = None
    for counts in search.counts(0, problem.num_ranks * problem.slots_per_rank):
        if (packs := search.pack(counts)) is not None:
            best = packs
    if best is None:
        return start_P
    row_RS = np.full((problem.num_ranks, problem.slots_per_rank), -1, dtype=np.int64)
    for row_S, pack in zip(row_RS, best, strict=True):
        row_S[: len(pack)] = by_load[pack]
    return row_RS.ravel()


class _Search:
    """`below`: the fullest rank of the best packing so far, which the next has to better."""

    def __init__(self, loads: list[float], below: float, ranks: int, slots: int):
        self.loads, self.below, self.ranks, self.slots = loads, below, ranks, slots
        self.nodes = 0

    def counts(self, expert: int, left: int) -> Iterator[tuple[int, ...]]:
        """Copies of the experts from `expert` on with `left` slots, if none alone is too heavy."""
        if expert == len(self.loads):
            yield ()
            return
        for count in range(1, left - (len(self.loads) - expert - 1) + 1):
            if self.loads[expert] / count < self._limit():
                for rest in self.counts(expert + 1, left - count):
                    yield (count, *rest)

    def _limit(self) -> float:
        """Not one rounding below, or equal packings would take turns."""
        return self.below * (1 - 1e-12)

    def pack(self, counts: tuple[int, ...]) -> list[list[int]] | None:
        """The experts of each rank in a packing below the limit, the best of these counts."""
        items = sorted(
            (
                (load / count, expert)
                for expert, (load, count) in enumerate(zip(self.loads, counts, strict=True))
                for _ in range(count)
            ),
            reverse=True,
        )
        if self.slots == 2:
            return self._pairs(items)
        best = None
        while (packs := self._fill(items, 0, [(0.0, ())] * self.ranks)) is not None:
            self.below = max(load for load, _ in packs)
            best = [list(experts) for _, experts in packs]
        return best

    def _pairs(self, items: list[tuple[float, int]]) -> list[list[int]] | None:
        """With two slots a rank the heaviest goes with the lightest, the second with the second."""
        padded = items + [(0.0, -1)] * (2 * self.ranks - len(items))
        pairs = [(padded[i], padded[-1 - i]) for i in range(self.ranks)]
        fullest = max(a[0] + b[0] for a, b in pairs)
        if fullest >= self._limit():
            return None
        self.below = fullest
        return [[expert for _, expert in pair if expert >= 0] for pair in pairs]

    def _fill(
        self,
        items: list[tuple[float, int]],
        at: int,
        packs: list[tuple[float, tuple[int, ...]]],
    ) -> list[tuple[float, tuple[int, ...]]] | None:
        """The first packing below the limit of the items from `at` on, heaviest first."""
        if at == len(items):
            return packs
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise CapacityError(
                f"optimal: no proof after {MOST_NODES} partial packings: take fewer slots a rank "
                "or another policy"
            )
        load, expert = items[at]
        seen = set()
        for pack, (have, experts) in enumerate(packs):
            if len(experts) == self.slots or have + load >= self._limit():
                continue
            if (have, len(experts)) in seen:  # ranks alike
                continue
            seen.add((have, len(experts)))
            grown = [*packs[:pack], (have + load, (*experts, expert)), *packs[pack + 1 :]]
            if (found := self._fill(items, at + 1, grown)) is not None:
                return found
        return None
