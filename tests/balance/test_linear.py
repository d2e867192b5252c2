"""The placement an engine starts with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.balance import linear_placement, slots_per_rank
from crossdock.core import ConfigError


@given(layers=st.integers(0, 4), experts=st.integers(1, 64), ranks=st.integers(1, 80))
def test_any_number_of_ranks(layers, experts, ranks):
    placement = linear_placement(layers, experts, ranks)
    slots = placement.slots_per_rank * ranks
    assert placement.slot_expert_LP.shape == (layers, slots)
    assert experts <= slots < experts + ranks  # as few slots as hold every expert
    for layer in range(layers):
        row = placement.slot_expert_LP[layer]
        copies = np.bincount(row, minlength=experts)
        assert copies.min() >= 1 and copies.max() - copies.min() <= 1
        assert (row[:experts] == np.arange(experts)).all()
        together = [placement.local_slots(layer, rank) for rank in range(ranks)]
        assert (np.concatenate(together) == row).all()


@given(experts=st.integers(1, 64), ranks=st.integers(1, 16), per_rank=st.integers(1, 20))
def test_redundant_experts_that_fit(experts, ranks, per_rank):
    redundant = ranks * per_rank - experts
    if redundant >= 0:
        assert slots_per_rank(experts, ranks, redundant) == per_rank
        placement = linear_placement(1, experts, ranks, redundant)
        slots, counts = placement.replicas(0)
        for expert in range(experts):
            mine = set(slots[expert, : counts[expert]].tolist())
            assert len(mine) == counts[expert]
            assert mine == set(np.flatnonzero(placement.slot_expert_LP[0] == expert).tolist())


@given(experts=st.integers(1, 64), ranks=st.integers(2, 80), redundant=st.integers(0, 80))
def test_redundant_experts_that_do_not_fit_name_those_that_do(experts, ranks, redundant):
    if (experts + redundant) % ranks == 0:
        return
    with pytest.raises(ConfigError) as caught:
        slots_per_rank(experts, ranks, redundant)
    message = str(caught.value)
    assert f"redundant_experts {redundant}" in message
    assert ("more ranks than slots" in message) == (experts + redundant < ranks)
    for value in message.split("work: ")[1].split(" or "):
        assert slots_per_rank(experts, ranks, int(value)) >= 1
        assert abs(int(value) - redundant) < ranks


def test_v3_decoding_on_320_ranks():
    """DeepSeek decodes 256 experts on 320 ranks: one slot a rank, 64 experts twice."""
    placement = linear_placement(58, 256, 320)
    assert placement.slots_per_rank == 1
    assert (np.bincount(placement.slot_expert_LP[0]) == [2] * 64 + [1] * 192).all()
