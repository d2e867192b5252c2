"""The best split of each expert's load over copies that are already placed: a linear programme.

Source: the programme of deepseek-ai/LPLB, over any placement as SGLang's solver has it; solved
exactly by HiGHS instead of a few interior-point steps.
"""

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem
from crossdock.balance.eplb import eplb
from crossdock.balance.score import copies
from crossdock.core import CrossdockError


def lp(problem: Problem) -> Answer:
    """Moves nothing: the current placement, or `eplb`'s where there is none, with shares that
    give the fullest rank the least load that this placement allows.

    Raises:
        ConfigError: an invalid problem.
    """
    check_problem(problem)
    placed = problem.current_LP
    slot_expert_LP = eplb(problem).slot_expert_LP if placed is None else placed
    return split(slot_expert_LP, problem.load_LE, problem.num_ranks)


def split(slot_expert_LP: np.ndarray, load_LE: np.ndarray, num_ranks: int) -> Answer:
    """The placement with its best shares for `load_LE`."""
    count_LE = copies(slot_expert_LP, load_LE.shape[1])
    rows = [
        _split_layer(row_P, load_E / max(load_E.max(), 1e-300), count_E, num_ranks)
        for row_P, load_E, count_E in zip(slot_expert_LP, load_LE, count_LE, strict=True)
    ]
    return Answer(slot_expert_LP, np.array(rows))


def _split_layer(
    row_P: np.ndarray, load_E: np.ndarray, count_E: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Variables: the share of each slot whose expert has others too, and the fullest rank's load.
    `load_E` is scaled to at most 1."""
    # Here alone, so that an engine, which imports this package, runs without scipy.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    rank_P = np.arange(len(row_P)) * num_ranks // len(row_P)
    share_P = np.where(row_P >= 0, 1.0 / np.maximum(count_E[row_P], 1), 0.0)
    several_P = (row_P >= 0) & (count_E[row_P] > 1) & (load_E[row_P] > 0)
    slots = np.flatnonzero(several_P)
    if not slots.size:
        return share_P
    fixed = np.flatnonzero(~several_P & (row_P >= 0))
    fixed_R = np.bincount(rank_P[fixed], load_E[row_P[fixed]] * share_P[fixed], num_ranks)
    n, var = len(slots), np.arange(len(slots))
    most = np.full(num_ranks, n)
    upper = coo_array(
        (
            np.concatenate([load_E[row_P[slots]], np.full(num_ranks, -1.0)]),
            (
                np.concatenate([rank_P[slots], np.arange(num_ranks)]),
                np.concatenate([var, most]),
            ),
        ),
        shape=(num_ranks, n + 1),
    )
    experts, of_slot = np.unique(row_P[slots], return_inverse=True)
    equal = coo_array((np.ones(n), (of_slot, var)), shape=(len(experts), n + 1))
    cost = np.zeros(n + 1)
    cost[n] = 1.0
    found = linprog(
        cost, A_ub=upper, b_ub=-fixed_R, A_eq=equal, b_eq=np.ones(len(experts)), method="highs"
    )
    if not found.success:
        raise CrossdockError(f"the linear programme of a split was not solved: {found.message}")
    x = np.clip(found.x[:n], 0.0, 1.0)
    share_P[slots] = x / np.bincount(of_slot, x)[of_slot]
    return share_P
