import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.balance import Answer, diff, moved_experts, rank_load, settle
from crossdock.core import Move


def random_placement(rng, experts, slots):
    row_P = np.full(slots, -1)
    some = rng.permutation(slots)
    row_P[some[:experts]] = np.arange(experts)
    extra = some[experts:]
    row_P[extra] = rng.integers(-1, experts, len(extra))
    return row_P


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_moves_lead_from_one_placement_to_the_other(seed):
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    slots = ranks * (-(-experts // ranks) + int(rng.integers(0, 3)))
    current_LP, new_LP = (
        np.array([random_placement(rng, experts, slots) for _ in range(2)]) for _ in range(2)
    )
    result_LP = current_LP.copy()
    for move in diff(current_LP, new_LP, ranks):
        assert current_LP[move.layer, move.source] == move.expert
        result_LP[move.layer, move.target] = move.expert
    result_LP[new_LP < 0] = -1
    assert (result_LP == new_LP).all()

    share_LP = rng.random(new_LP.shape)
    settled = settle(Answer(new_LP, share_LP), current_LP, ranks)
    load_LE = rng.random((2, experts))
    before, after = (
        rank_load(load_LE, answer, ranks) for answer in (Answer(new_LP, share_LP), settled)
    )
    assert after == pytest.approx(before)
    # What is left to move crosses ranks, or is another copy of what the rank has.
    needed = diff(current_LP, settled.slot_expert_LP, ranks)
    per_rank = slots // ranks
    remote = {
        (m.layer, m.expert, m.target // per_rank)
        for m in needed
        if m.source // per_rank != m.target // per_rank
    }
    assert len(remote) == moved_experts(current_LP, new_LP, ranks).sum()
    for layer in range(2):
        for rank in range(ranks):
            old, new = (
                p[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
                for p in (current_LP, settled.slot_expert_LP)
            )
            kept = sum(min(old.count(e), new.count(e)) for e in set(old))
            assert sum(a == b for a, b in zip(old, new, strict=True)) >= kept


def test_sources_are_near_and_take_turns():
    current_LP = np.array([[0, 1, 0, 2, 3, 4]])
    new_LP = np.array([[0, 0, 1, 0, 0, 0]])
    assert diff(current_LP, new_LP, 3) == (
        Move(0, 0, 0, 1),  # from its own rank
        Move(0, 1, 1, 2),
        Move(0, 0, 2, 3),
        Move(0, 0, 0, 4),
        Move(0, 0, 2, 5),
    )


def test_nothing_to_copy_from_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="no slot holds expert 1"):
        diff(np.array([[0, -1]]), np.array([[0, 1]]))
    with pytest.raises(ValueError, match="differ in shape"):
        diff(np.array([[0, 1]]), np.array([[0, 1, 0, 1]]))
