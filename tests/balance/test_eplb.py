import numpy as np
import pytest

from crossdock.balance import POLICIES, Answer, Problem, imbalance, rank_load
from crossdock.balance.eplb import pack, rebalance_experts
from crossdock.core import ConfigError

README = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def test_the_original_s_example():
    slot_expert_LP, expert_slots_LEM, count_LE = rebalance_experts(README, 16, 4, 2, 8)
    assert slot_expert_LP.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert count_LE.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    # fmt: off
    assert expert_slots_LEM.tolist() == [
        [[12, -1], [15, 13], [11, -1], [6, -1], [7, 5], [0, 2],
         [1, -1], [3, -1], [4, -1], [9, -1], [8, 10], [14, -1]],
        [[13, -1], [15, 11], [8, -1], [14, -1], [9, -1], [10, 12],
         [2, 4], [0, -1], [6, 3], [7, -1], [1, -1], [5, -1]],
    ]
    # fmt: on
    answer = POLICIES["eplb"](Problem(README, 8, 2, num_nodes=2, num_groups=4))
    assert answer.slot_expert_LP.tolist() == slot_expert_LP.tolist()
    assert rank_load(README, answer, 8).tolist() == [
        [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152],
        [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5],
    ]
    assert imbalance(README, answer, 8) == pytest.approx([1.2081, 1.2422], abs=5e-5)


def test_groups_that_do_not_divide_over_the_nodes_are_placed_globally():
    answer = POLICIES["eplb"](Problem(README, 8, 2, num_nodes=2, num_groups=3))
    assert answer.slot_expert_LP.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    assert imbalance(README, answer, 8) == pytest.approx([1.0726, 1.1903], abs=5e-5)


def test_equal_loads_need_no_copies_and_a_hot_expert_gets_them():
    _, _, count_LE = rebalance_experts(np.full((1, 8), 50), 8, 1, 1, 4)
    assert count_LE.tolist() == [[1] * 8]
    hot = np.array([[1000, 1, 1, 1, 1, 1, 1, 1]])
    _, _, count_LE = rebalance_experts(hot, 12, 2, 2, 4)
    assert count_LE[0, 0] > count_LE[0, 1]


def naive(load_E, slots, groups, nodes, ranks):
    """One layer, one item after the other, in float32 like the original."""

    def pack_items(loads, packs):
        size = len(loads) // packs
        if size == 1:
            return [(i, 0) for i in range(len(loads))]
        place, total, filled = [None] * len(loads), [np.float32(0)] * packs, [0] * packs
        for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
            pack = min((p for p in range(packs) if filled[p] < size), key=lambda p: total[p])
            place[item] = (pack, filled[pack])
            total[pack] += loads[item]
            filled[pack] += 1
        return place

    load_E = load_E.astype(np.float32)
    if groups % nodes:
        groups = nodes = 1
    size = len(load_E) // groups
    by_node = [[None] * (groups // nodes) for _ in range(nodes)]
    for group, (node, at) in enumerate(
        pack_items([load_E[g * size : (g + 1) * size].sum() for g in range(groups)], nodes)
    ):
        by_node[node][at] = group
    result = []
    for node_groups in by_node:
        experts = [g * size + i for g in node_groups for i in range(size)]
        count = dict.fromkeys(experts, 1)
        made = list(experts)
        while len(made) < slots // nodes:
            hot = max(experts, key=lambda e: load_E[e] / np.float32(count[e]))
            count[hot] += 1
            made.append(hot)
        per_rank = slots // ranks
        row = [None] * len(made)
        shares = [load_E[e] / np.float32(count[e]) for e in made]
        for e, (rank, at) in zip(made, pack_items(shares, ranks // nodes), strict=True):
            row[rank * per_rank + at] = e
        result += row
    return result


@pytest.mark.parametrize(
    ("experts", "slots", "groups", "nodes", "ranks"),
    [
        (64, 80, 8, 4, 16),
        (64, 80, 1, 1, 16),
        (60, 72, 6, 3, 12),
        (32, 32, 8, 2, 8),
        (16, 24, 4, 2, 24),
        (24, 48, 5, 2, 4),
    ],
)
def test_all_layers_at_once_do_what_one_item_at_a_time_does(experts, slots, groups, nodes, ranks):
    load_LE = np.random.default_rng().gamma(0.5, 1000.0, (6, experts))
    slot_expert_LP, _, count_LE = rebalance_experts(load_LE, slots, groups, nodes, ranks)
    for layer, load_E in enumerate(load_LE):
        expected = naive(load_E, slots, groups, nodes, ranks)
        assert slot_expert_LP[layer].tolist() == expected
        assert count_LE[layer].tolist() == np.bincount(expected, minlength=experts).tolist()


def test_zero_loads_fill_packs_in_order():
    pack_Xn, order_Xn = pack(np.zeros((1, 6), np.float32), 3)
    assert pack_Xn.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert order_Xn.tolist() == [[0, 1, 0, 1, 0, 1]]


def test_groups_that_do_not_divide_the_experts_name_what_would():
    with pytest.raises(ConfigError, match=r"num_groups 5 .* 12 experts.*: 4 or 6"):
        POLICIES["eplb"](Problem(README, 8, 2, num_groups=5))


def test_imbalance_of_a_layer_without_load_is_one():
    load_LE = np.array([[0.0, 0.0], [3.0, 1.0]])
    answer = Answer(np.array([[0, 1], [0, 1]]))
    assert imbalance(load_LE, answer, 2).tolist() == [1.0, 1.5]
