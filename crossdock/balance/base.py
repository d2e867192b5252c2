"""What every policy is given and what it answers: plain arrays, no clock, no torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Problem:
    """Place E experts of L layers on `num_ranks * slots_per_rank` = P slots.

    load_LE: tokens per logical expert over a window, any non-negative numbers. num_nodes,
    num_groups: for hierarchical policies; num_ranks is a multiple of num_nodes. current_LP: the
    placement now (logical expert per slot, -1 empty), None where there is none. expert_bytes: of
    one expert in one layer, what moving it costs. move_cost: the same in the unit of the load, so
    that a policy can weigh it against what the fullest rank gains; None: the policy's own guess.
    """

    load_LE: np.ndarray
    num_ranks: int
    slots_per_rank: int
    num_nodes: int = 1
    num_groups: int = 1
    current_LP: np.ndarray | None = None
    expert_bytes: int = 1
    move_cost: float | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """slot_expert_LP: int64 [L, P], -1 for a slot left empty. share_LP: float64, the part of its
    expert's load that a slot is to take (sums to 1 over the slots of an expert); None: equal."""

    slot_expert_LP: np.ndarray
    share_LP: np.ndarray | None = None


Policy = Callable[[Problem], Answer]
