"""EPLB, DeepSeek's planner: copies for the hottest experts, then greedy packing.

Source: deepseek-ai/EPLB, `eplb.py`, steps and results the same; all layers at once. In float32, as
there, so that its ties and roundings are met too; equal loads keep the order of the experts.
"""

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem, nearest_multiples
from crossdock.core import ConfigError


def eplb(problem: Problem) -> Answer:
    """Hierarchical where the groups divide over the nodes, else global. Equal shares; an expert's
    copies may share a rank. The current placement plays no part.

    Raises:
        ConfigError: an invalid problem, or groups that do not divide the experts.
    """
    check_problem(problem)
    slots = problem.num_ranks * problem.slots_per_rank
    slot_expert_LP, _, _ = rebalance_experts(
        problem.load_LE, slots, problem.num_groups, problem.num_nodes, problem.num_ranks
    )
    return Answer(slot_expert_LP)


def rebalance_experts(
    load_LE: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three maps that EPLB returns, int64.

    Returns:
        `slot_expert_LP`; `expert_slots_LEM`, the slots of each expert in the order of their
        making, padded with -1 to the largest count; `count_LE`.
    """
    num_experts = load_LE.shape[1]
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    if num_experts % num_groups:
        raise ConfigError(
            f"num_groups {num_groups} does not divide {num_experts} experts; nearest values that "
            f"work: {nearest_multiples(num_groups, num_nodes, num_experts)}"
        )
    load_LE = np.asarray(load_LE, dtype=np.float32)
    slot_expert_LP, copy_LP, count_LE = _hierarchical(
        load_LE, num_slots, num_groups, num_nodes, num_ranks
    )
    expert_slots_LEM = np.full((*load_LE.shape, count_LE.max()), -1, dtype=np.int64)
    layer_L1 = np.arange(len(load_LE))[:, None]
    expert_slots_LEM[layer_L1, slot_expert_LP, copy_LP] = np.arange(num_slots)
    return slot_expert_LP, expert_slots_LEM, count_LE


def _hierarchical(
    load_LE: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(slot_expert_LP, copy_LP, count_LE)`: groups to nodes, copies in a node, slots to ranks."""
    num_layers, num_experts = load_LE.shape
    group_size = num_experts // num_groups
    # A node's experts stand together: place_LE is where an expert stands, expert_LE who is there.
    group_load_LG = load_LE.reshape(num_layers, num_groups, group_size).sum(axis=2)
    node_LG, rank_LG = pack(group_load_LG, num_nodes)
    place_LG = (node_LG * (num_groups // num_nodes) + rank_LG) * group_size
    place_LE = (place_LG[:, :, None] + np.arange(group_size)).reshape(num_layers, num_experts)
    expert_LE = _inverse(place_LE)

    node_load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(
        num_layers * num_nodes, num_experts // num_nodes
    )
    made_XP, copy_XP, count_XE = replicate(node_load_XE, num_slots // num_nodes)

    share_XP = np.take_along_axis(node_load_XE / count_XE, made_XP, axis=1)
    rank_XP, order_XP = pack(share_XP, num_ranks // num_nodes)
    at_XP = _inverse(rank_XP * (num_slots // num_ranks) + order_XP)
    made_LNP = np.take_along_axis(made_XP, at_XP, axis=1).reshape(num_layers, num_nodes, -1)
    first_N = np.arange(num_nodes) * (num_experts // num_nodes)
    slot_place_LP = (made_LNP + first_N[:, None]).reshape(num_layers, num_slots)
    return (
        np.take_along_axis(expert_LE, slot_place_LP, axis=1),
        np.take_along_axis(copy_XP, at_XP, axis=1).reshape(num_layers, num_slots),
        np.take_along_axis(count_XE.reshape(num_layers, -1), place_LE, axis=1),
    )


def pack(load_Xn: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy packing, each row by itself: n items into packs of n / num_packs items.

    Heaviest first, each to the lightest pack with room, the first of equals. One item a pack is
    the identity.

    Returns:
        `(pack_Xn, order_Xn)` of each item: its pack, and how many lay there before it.
    """
    num_rows, num_items = load_Xn.shape
    size = num_items // num_packs
    if size == 1:
        pack_Xn = np.tile(np.arange(num_items), (num_rows, 1))
        return pack_Xn, np.zeros_like(pack_Xn)
    by_load_Xn = np.argsort(-load_Xn, axis=1, kind="stable")
    sorted_nX = np.ascontiguousarray(np.take_along_axis(load_Xn, by_load_Xn, axis=1).T)
    pack_load_Xm = np.zeros((num_rows, num_packs), dtype=load_Xn.dtype)
    filled, pack_load = np.zeros(num_rows * num_packs, dtype=np.int64), pack_load_Xm.ravel()
    row_X = np.arange(num_rows) * num_packs
    at_nX = np.empty((num_items, num_rows), dtype=np.int64)
    order_nX = np.empty_like(at_nX)
    for item, item_load_X in enumerate(sorted_nX):
        at_X = at_nX[item]
        pack_load_Xm.argmin(axis=1, out=at_X)
        at_X += row_X
        order_X = filled[at_X]
        order_nX[item] = order_X
        load_X = pack_load[at_X] + item_load_X
        if item >= size - 1:  # no pack can be full before
            load_X[order_X == size - 1] = np.inf
        pack_load[at_X] = load_X
        order_X += 1
        filled[at_X] = order_X
    pack_Xn, order_Xn = np.empty_like(by_load_Xn), np.empty_like(by_load_Xn)
    np.put_along_axis(pack_Xn, by_load_Xn, (at_nX - row_X).T, axis=1)
    np.put_along_axis(order_Xn, by_load_Xn, order_nX.T, axis=1)
    return pack_Xn, order_Xn


def replicate(load_XE: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots for E experts, then one by one for the expert with the most load a copy.

    Returns:
        `(expert_XP, copy_XP, count_XE)`: whose slot it is, which of its copies, and how many.
    """
    num_rows, num_experts = load_XE.shape
    expert_XP = np.tile(np.arange(num_slots), (num_rows, 1))
    copy_XP = np.zeros_like(expert_XP)
    count_XE = np.ones((num_rows, num_experts), dtype=np.int64)
    each_XE = load_XE.copy()
    row_X = np.arange(num_rows) * num_experts
    load, count, each = load_XE.ravel(), count_XE.ravel(), each_XE.ravel()
    for slot in range(num_experts, num_slots):
        expert_X = each_XE.argmax(axis=1)
        expert_XP[:, slot] = expert_X
        expert_X += row_X
        copies_X = count[expert_X]
        copy_XP[:, slot] = copies_X
        copies_X += 1
        count[expert_X] = copies_X
        each[expert_X] = load[expert_X] / copies_X.astype(load.dtype)
    return expert_XP, copy_XP, count_XE


def _inverse(place_Xn: np.ndarray) -> np.ndarray:
    """Of a permutation in each row."""
    inverse_Xn = np.empty_like(place_Xn)
    np.put_along_axis(inverse_Xn, place_Xn, np.arange(place_Xn.shape[1])[None], axis=1)
    return inverse_Xn
