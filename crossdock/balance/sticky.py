"""Ours: the best balance per byte moved, step by step from the placement there is.

Local search around the fullest rank. A step swaps two slots, fills an empty one, or overwrites a
copy that its expert can spare; the one that lowers a smooth measure of the rank loads most per
expert moved is taken. A second search starts after the copies were dealt out anew, a third from
EPLB's placement, its ranks numbered so that most experts stay. Of all points on the way that one is
taken where level and cost of moving together are least, among those that gain more than they cost;
nothing is moved where there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem
from crossdock.balance.eplb import eplb
from crossdock.balance.linear import linear_placement

MOVE_COST = 0.0003
"""Of the mean rank load, per expert moved, where the problem does not say."""
RISK = 0.4
"""A slot counts for its load w (mean rank load: 1) as w + RISK w^2: loads drift, each expert's by a
part of it, so a rank with a few heavy copies varies more than one with many light ones."""
WORTH = 0.7
"""Copies are dealt out anew where one more leaves its former expert's below this part of the
heaviest."""
CHEAPEST = 32
"""Slots looked at to be overwritten, by load; more make no better placements, only slower ones."""
PATIENCE = 12
"""Steps without a new best after which a search ends."""


def sticky(problem: Problem) -> Answer:
    """Starts from the current placement, or the linear one where there is none. Equal shares;
    copies of an expert never meet on a rank unless they did before.

    Raises:
        ConfigError: an invalid problem.
    """
    check_problem(problem)
    load_LE, ranks = problem.load_LE, problem.num_ranks
    start_LP = problem.current_LP
    if start_LP is None:
        num_layers, num_experts = load_LE.shape
        redundant = ranks * problem.slots_per_rank - num_experts
        start_LP = linear_placement(num_layers, num_experts, ranks, redundant).slot_expert_LP
    fresh_LP = eplb(replace(problem, num_nodes=1, num_groups=1)).slot_expert_LP
    rows = [
        _improve(row_P, fresh_P, load_E.astype(float), ranks, problem.move_cost)
        for row_P, fresh_P, load_E in zip(start_LP, fresh_LP, load_LE, strict=True)
    ]
    return Answer(np.array(rows))


def _improve(
    start_P: np.ndarray,
    fresh_P: np.ndarray,
    load_E: np.ndarray,
    ranks: int,
    move_cost: float | None,
) -> np.ndarray:
    mean = load_E.sum() / ranks
    if mean == 0:
        return start_P
    cost = MOVE_COST if move_cost is None else move_cost / mean
    start, alone, dealt, fresh = (
        _State.of(row_P, load_E / mean, ranks) for row_P in (start_P, start_P, start_P, fresh_P)
    )
    found = [_search(alone, start, cost)]
    if dealt.deal_copies():
        found.append(_search(dealt, start, cost))
    fresh.empty_doubles()
    fresh.number_like(start)
    if start.fullest() - 1 > cost * fresh.moved_from(start):
        found.append(_search(fresh, start, cost))
    return min(found, key=lambda pair: pair[0])[1]


def _search(state: "_State", start: "_State", cost: float) -> tuple[float, np.ndarray]:
    """`(level and cost, expert_P)` of the best point on the way, infinite if none is worth it."""
    full = start.fullest()
    best, best_P, since = np.inf, start.expert_P, 0
    while True:
        paid = cost * state.moved_from(start)
        value = state.level() + paid
        if value < best and full - state.fullest() >= paid:
            best, best_P, since = value, state.expert_P.copy(), 0
        if since == PATIENCE or not state.step():
            return best, best_P
        since += 1


@dataclass(eq=False)
class _State:
    """One layer while it is searched. Loads in units of the mean rank load."""

    load_E: np.ndarray
    rank_P: np.ndarray
    expert_P: np.ndarray
    count_E: np.ndarray
    held_RE: np.ndarray
    """Copies of each expert on each rank."""
    rank_load_R: np.ndarray
    """By `_weight`, not plain."""

    @classmethod
    def of(cls, expert_P: np.ndarray, load_E: np.ndarray, ranks: int) -> "_State":
        rank_P = np.arange(len(expert_P)) * ranks // len(expert_P)
        held_RE = np.zeros((ranks, len(load_E)), dtype=np.int64)
        there = expert_P >= 0
        np.add.at(held_RE, (rank_P[there], expert_P[there]), 1)
        count_E = held_RE.sum(axis=0)
        return cls(
            load_E, rank_P, expert_P.copy(), count_E, held_RE, held_RE @ _weight(load_E / count_E)
        )

    def empty_doubles(self) -> None:
        """Leaves one copy of an expert on a rank."""
        for rank, expert in np.argwhere(self.held_RE > 1):
            slots = np.flatnonzero((self.rank_P == rank) & (self.expert_P == expert))
            for slot in slots[1:]:
                self._write(int(slot), -1)
        self._add_up()

    def number_like(self, other: "_State") -> None:
        """Gives the ranks' contents to the ranks of `other` that hold most of the same experts."""
        # Here alone, so that an engine, which imports this package, runs without scipy.
        from scipy.optimize import linear_sum_assignment

        same_RR = np.minimum(other.held_RE, 1) @ np.minimum(self.held_RE, 1).T
        from_R = linear_sum_assignment(same_RR, maximize=True)[1]
        self.expert_P = self.expert_P.reshape(len(from_R), -1)[from_R].ravel()
        self.held_RE = self.held_RE[from_R]
        self._add_up()

    def moved_from(self, other: "_State") -> int:
        """Experts that reach a rank which does not hold them in `other`."""
        return int(np.count_nonzero((self.held_RE > 0) & (other.held_RE == 0)))

    def level(self) -> float:
        """Between the fullest rank and the ranks near it, in the unit of a rank's load."""
        smooth = _measure(self.rank_load_R).mean() ** (1 / 8)
        return float(smooth + self.rank_load_R.max()) / 2

    def fullest(self) -> float:
        """The plain load of the fullest rank."""
        return float((self.held_RE @ (self.load_E / self.count_E)).max())

    def step(self) -> bool:
        """The best step for the fullest rank; False if none lowers the measure."""
        hot = int(self.rank_load_R.argmax())
        here = np.flatnonzero((self.rank_P == hot) & (self.expert_P >= 0))
        best, do = -1e-12, None
        for gain, writes in (*self._swaps(hot, here), *self._overwrites(hot, here)):
            if gain < best:
                best, do = gain, writes
        if do is None:
            return False
        for slot, expert in do:
            self._write(slot, expert)
        self._add_up()
        return True

    def deal_copies(self) -> bool:
        """Gives copies that their expert can spare to the expert with the heaviest ones, while
        that is worth it. Returns whether any were."""
        dealt = False
        while True:
            heavy = int((self.load_E / self.count_E).argmax())
            left_E = np.where(
                self.count_E > 1, self.load_E / np.maximum(self.count_E - 1, 1), np.inf
            )
            left_E[heavy] = np.inf
            spare = int(left_E.argmin())
            limit = WORTH * self.load_E[heavy] / self.count_E[heavy]
            slots = np.flatnonzero(self.expert_P < 0)
            if not slots.size and left_E[spare] < limit:
                slots = np.flatnonzero(self.expert_P == spare)
            slots = slots[self.held_RE[self.rank_P[slots], heavy] == 0]
            if not slots.size:
                return dealt
            gain_Q = self._overwrite_gains(np.array([heavy]), slots)[0]
            self._write(int(slots[gain_Q.argmin()]), heavy)
            self._add_up()
            dealt = True

    def _add_up(self) -> None:
        """Anew, so that roundings do not add up."""
        self.rank_load_R = self.held_RE @ _weight(self.load_E / self.count_E)

    def _write(self, slot: int, expert: int) -> None:
        rank, old = self.rank_P[slot], self.expert_P[slot]
        for which, change in ((old, -1), (expert, 1)):
            if which >= 0:
                self.held_RE[rank, which] += change
                self.count_E[which] += change
        self.expert_P[slot] = expert

    def _swaps(self, hot: int, here: np.ndarray) -> Iterator[tuple[float, list[tuple[int, int]]]]:
        """The best exchange of a slot of the hot rank with one elsewhere, which may be empty."""
        there = np.flatnonzero(self.rank_P != hot)
        if not there.size:
            return
        x_S, y_Q, rank_Q = self.expert_P[here], self.expert_P[there], self.rank_P[there]
        each_E = _weight(self.load_E / self.count_E)
        change_SQ = each_E[x_S][:, None] - np.where(y_Q >= 0, each_E[y_Q], 0.0)
        load_Q = self.rank_load_R[rank_Q]
        hot_load = self.rank_load_R[hot]
        gain_SQ = (
            _measure(hot_load - change_SQ)
            + _measure(load_Q + change_SQ)
            - _measure(load_Q)
            - _measure(hot_load)
        )
        met_SQ = self.held_RE[rank_Q][:, x_S].T > 0
        met_SQ |= (y_Q >= 0) & (self.held_RE[hot, y_Q] > 0)
        gain_SQ[met_SQ] = 0.0
        gain_SQ /= np.where(y_Q >= 0, 2, 1)
        s, q = np.unravel_index(gain_SQ.argmin(), gain_SQ.shape)
        yield (
            float(gain_SQ[s, q]),
            [(int(here[s]), int(y_Q[q])), (int(there[q]), int(x_S[s]))],
        )

    def _overwrites(
        self, hot: int, here: np.ndarray
    ) -> Iterator[tuple[float, list[tuple[int, int]]]]:
        """The best copy of one of the hot rank's experts elsewhere, in an empty slot or over a
        copy that can be spared; and the best expert over a copy that the hot rank can spare."""
        expert_P, count_E = self.expert_P, self.count_E
        spare = np.flatnonzero((expert_P < 0) | (count_E[expert_P] > 1))
        on_hot = spare[self.rank_P[spare] == hot]
        each_Q = np.where(expert_P[spare] < 0, 0.0, (self.load_E / count_E)[expert_P[spare]])
        spare = spare[np.argsort(each_Q, kind="stable")[:CHEAPEST]]
        for experts, slots in (
            (np.unique(self.expert_P[here]), spare),
            (np.arange(len(self.load_E)), on_hot),
        ):
            if slots.size:
                gain_XQ = self._overwrite_gains(experts, slots)
                x, q = np.unravel_index(gain_XQ.argmin(), gain_XQ.shape)
                yield float(gain_XQ[x, q]), [(int(slots[q]), int(experts[x]))]

    def _overwrite_gains(self, experts: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What writing expert x to slot q does to the measure; 0 where q's rank has x."""
        rank_Q, old_Q = self.rank_P[slots], self.expert_P[slots]
        count_X, load_X = self.count_E[experts], self.load_E[experts]
        new_X = _weight(load_X / (count_X + 1))
        less_XR = self.held_RE[:, experts].T * (new_X - _weight(load_X / count_X))[:, None]
        was_Q = np.maximum(old_Q, 0)
        count_Q = np.maximum(self.count_E[was_Q], 2)  # an empty slot's is not used
        left_Q = np.where(old_Q >= 0, _weight(self.load_E[was_Q] / (count_Q - 1)), 0.0)
        more_Q = np.where(old_Q >= 0, left_Q - _weight(self.load_E[was_Q] / count_Q), 0.0)
        load_QR = self.rank_load_R + self.held_RE[:, was_Q].T * more_Q[:, None]
        load_QR[np.arange(len(slots)), rank_Q] -= left_Q
        load_XQR = less_XR[:, None, :] + load_QR
        load_XQR[:, np.arange(len(slots)), rank_Q] += new_X[:, None]
        gain_XQ = _measure(load_XQR).sum(axis=2) - _measure(self.rank_load_R).sum()
        gain_XQ[self.held_RE[rank_Q][:, experts].T > 0] = 0.0
        return gain_XQ


def _measure(load: np.ndarray) -> np.ndarray:
    """To the 8th power: a sum of these is ruled by the maximum and still sees what is near it."""
    square = load * load
    square *= square
    return square * square


def _weight(load: np.ndarray) -> np.ndarray:
    return load + RISK * load**2
