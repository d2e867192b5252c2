"""Maps from logical experts to their slots."""

import numpy as np
import pytest

from crossdock.core import Placement


def test_slots_of_experts_in_order_filled_up_by_going_through_them_again():
    rng = np.random.default_rng(0)
    for _ in range(50):
        experts, more = int(rng.integers(1, 40)), int(rng.integers(0, 30))
        held = np.concatenate([np.arange(experts), rng.integers(-1, experts, more)])
        rng.shuffle(held)
        slots_EM, count_E = Placement(0, held[None], experts, 1).replicas(0)
        of_each = [np.flatnonzero(held == expert) for expert in range(experts)]
        assert count_E.tolist() == [len(slots) for slots in of_each]
        width = int(count_E.max())
        assert slots_EM.tolist() == [np.resize(slots, width).tolist() for slots in of_each]


def test_an_expert_without_a_slot_is_named():
    placement = Placement(0, np.array([[0, 1, 3, -1]]), 4, 1)
    with pytest.raises(ValueError, match="layer 0: expert 2 has no slot"):
        placement.replicas(0)
