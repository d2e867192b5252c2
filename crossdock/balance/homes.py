"""For planners that leave every expert at home and give parts of its load to replicas."""

from collections.abc import Sequence

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.moves import settle

Quotas = list[tuple[int, int, float]]
"""`(expert, rank, tokens)`: what replicas take over from the homes."""

FINE = 1 << 16
"""Units of a mean rank load, where loads are no whole numbers."""


def home_slots(problem: Problem) -> np.ndarray:
    """`home_LE`: of an expert's slots now, the one that is nearest to its rank's first, where a
    planner that leaves experts at home has put it; without a placement, experts in order in each
    rank's first slots, as many on each rank as can be."""
    num_layers, num_experts = problem.load_LE.shape
    if problem.current_LP is not None:
        slot_P = np.arange(problem.num_ranks * problem.slots_per_rank)
        near_P = np.argsort(slot_P % problem.slots_per_rank, kind="stable")
        home_LE = np.empty((num_layers, num_experts), dtype=np.int64)
        for home_E, row_P in zip(home_LE, problem.current_LP[:, near_P], strict=True):
            experts, first = np.unique(row_P, return_index=True)
            home_E[experts[experts >= 0]] = near_P[first[experts >= 0]]
        return home_LE
    ends = np.arange(1, problem.num_ranks + 1) * num_experts // problem.num_ranks
    rank_E = np.searchsorted(ends, np.arange(num_experts), side="right")
    first_E = np.concatenate([[0], ends])[rank_E]
    home_E = rank_E * problem.slots_per_rank + np.arange(num_experts) - first_E
    return np.tile(home_E, (num_layers, 1))


def whole_tokens(load_E: np.ndarray) -> np.ndarray:
    """Loads as whole numbers, int64; fractions are counted in fine units first."""
    if np.array_equal(load_E, np.floor(load_E)) and load_E.sum() < 1 << 53:
        return load_E.astype(np.int64)
    return np.rint(load_E / load_E.sum() * (FINE * len(load_E))).astype(np.int64)


def quota_answer(problem: Problem, home_LE: np.ndarray, layers: Sequence[Quotas]) -> Answer:
    """Homes where they are, replicas in each rank's other slots, shares by quota. `layers`: in the
    units of `whole_tokens`. Replicas that are on their rank already keep their slot."""
    num_layers, num_experts = problem.load_LE.shape
    slots = problem.slots_per_rank
    slot_expert_LP = np.full((num_layers, problem.num_ranks * slots), -1, dtype=np.int64)
    share_LP = np.zeros(slot_expert_LP.shape)
    for layer, quotas in enumerate(layers):
        row_P, share_P = slot_expert_LP[layer], share_LP[layer]
        load_E = whole_tokens(problem.load_LE[layer])
        row_P[home_LE[layer]] = np.arange(num_experts)
        share_P[home_LE[layer]] = 1.0
        for expert, rank, tokens in quotas:
            slot = rank * slots + int(np.argmax(row_P[rank * slots : (rank + 1) * slots] < 0))
            row_P[slot] = expert
            share_P[slot] = tokens / load_E[expert]
            share_P[home_LE[layer, expert]] -= share_P[slot]
    np.maximum(share_LP, 0.0, out=share_LP)
    answer = Answer(slot_expert_LP, share_LP)
    if problem.current_LP is None:
        return answer
    return settle(answer, problem.current_LP, problem.num_ranks)
