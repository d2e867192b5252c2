"""Moving experts between ranks, all of them in this process: what is served is always whole."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crossdock.comm.slot_copies import HostCopies, stride_of
from crossdock.core import ConfigError, EngineConfig, Placement
from crossdock.engine import build
from crossdock.engine.rebalance import Rebalancer

EXPERTS, SLOTS, LAYERS = 6, 4, 3


class FakeLayer:
    """Slots filled with the numbers of their experts; a lookup checks what a token would meet."""

    def __init__(self, index, rank, placement):
        self.index, self.rank = index, rank
        local = placement.local_slots(index, rank).astype(np.float32)
        self.tensors = (
            torch.from_numpy(local)[:, None].repeat(1, 10),
            torch.from_numpy(local).to(torch.bfloat16)[:, None, None].repeat(1, 3, 2),
        )
        self.placement = placement

    def slot_tensors(self):
        return self.tensors

    def place(self, placement):
        self.placement = placement

    def check(self):
        expected = self.placement.local_slots(self.index, self.rank)
        for slot, expert in enumerate(expected):
            if expert >= 0:
                assert all((t[slot] == expert).all() for t in self.tensors)


def draw(rng, ranks):
    free = ranks * SLOTS - EXPERTS
    rows = [
        rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(-1, EXPERTS, free)]))
        for _ in range(LAYERS)
    ]
    return np.array(rows)


class Ranks:
    def __init__(self, rng, size, places=SLOTS, budget=17):
        placement = Placement(0, draw(rng, size), EXPERTS, size)
        nbytes = 10 * 4 + 6 * 2
        self.area = torch.zeros(size, places * stride_of(nbytes), dtype=torch.uint8)
        self.layers = [[FakeLayer(i, r, placement) for i in range(LAYERS)] for r in range(size)]
        self.movers = [
            Rebalancer(r, placement, self.layers[r], HostCopies(r, self.area, nbytes), budget)
            for r in range(size)
        ]

    def step(self):
        """One exchange; afterwards every rank must serve the same, and what it says it serves."""
        rows = [mover.words() for mover in self.movers]
        ended = [mover.advance(rows) for mover in self.movers]
        for layers in self.layers:
            for layer, first in zip(layers, self.layers[0], strict=True):
                layer.check()
                assert np.array_equal(
                    layer.placement.slot_expert_LP[layer.index],
                    first.placement.slot_expert_LP[layer.index],
                )
        return ended


@pytest.mark.parametrize("size", [2, 3])
def test_every_step_serves_a_whole_placement(size):
    rng = np.random.default_rng()
    ranks = Ranks(rng, size)
    # Steps in which a layer's copies travel, by 17 of their 52 bytes, and a few to switch it.
    most = LAYERS * (-(-size * SLOTS * 52 // 17) + 3)
    for epoch in range(1, 6):
        target = draw(rng, size)
        for late, mover in enumerate(ranks.movers):  # ranks hear of it one after another
            mover.begin(epoch, target)
            if late < size - 1:
                assert ranks.step() == [None] * size
        for _ in range(most):
            ended = ranks.step()
            if ended[0] is not None:
                break
        assert all(e is not None and e.error is None and e.epoch == epoch for e in ended)
        assert not any(mover.busy for mover in ranks.movers)
        for layers in ranks.layers:
            for layer in layers:
                assert np.array_equal(
                    layer.placement.slot_expert_LP[layer.index], target[layer.index]
                )


def test_the_smallest_budget_still_moves(monkeypatch):
    rng = np.random.default_rng()
    ranks = Ranks(rng, 2)
    config = EngineConfig("m", ranks=2, rebalance="manual", rebalance_step_mib=2.0**-30)
    for rank, mover in enumerate(ranks.movers):
        monkeypatch.setattr(build, "build_copies", lambda *_, made=mover.copies: made)
        world, model = SimpleNamespace(rank=rank), SimpleNamespace(moe_layers=ranks.layers[rank])
        ranks.movers[rank] = build._build_rebalancer(config, world, mover.placement, model)
    target = draw(rng, 2)
    for mover in ranks.movers:
        mover.begin(1, target)
    ended = next(
        (e for e in (ranks.step() for _ in range(LAYERS * (2 * SLOTS * 52 + 3))) if e[0]), None
    )
    assert ended is not None and ended[0].error is None
    assert np.array_equal(ranks.movers[1].placement.slot_expert_LP, target)


def test_a_damaged_copy_leaves_the_old_placement():
    rng = np.random.default_rng(3)
    ranks = Ranks(rng, 2)
    before, target = ranks.movers[0].placement.slot_expert_LP, draw(rng, 2)
    for mover in ranks.movers:
        mover.begin(1, target)
    ended = [None, None]
    while ended[0] is None:
        ranks.area[:, 3] ^= 0x40  # something writes where it should not
        ended = ranks.step()
    assert all("arrived damaged on rank" in e.error for e in ended)
    done = ended[0].layers
    assert done < LAYERS
    for mover in ranks.movers:
        assert np.array_equal(mover.placement.slot_expert_LP[done:], before[done:])
        assert not mover.busy
        mover.begin(2, target)  # and it can be tried again
    while ranks.step()[0] is None:
        pass
    assert np.array_equal(ranks.movers[1].placement.slot_expert_LP, target)


def test_a_layer_is_not_switched_before_its_copies_are_known_to_be_intact():
    """As on a GPU, where they are compared beside running steps."""
    rng = np.random.default_rng(6)
    ranks = Ranks(rng, 2)
    slow, begun = ranks.movers[0].copies, []
    look, slow.intact = slow.intact, lambda: None
    examine = slow.examine
    slow.examine = lambda places: (begun.append(list(places)), examine(places))
    before, target = ranks.movers[0].placement.slot_expert_LP, draw(rng, 2)
    for mover in ranks.movers:
        mover.begin(1, target)
    for _ in range(30):
        assert ranks.step() == [None, None]
    assert len(begun) == 1  # once, and not in every step
    for mover in ranks.movers:
        assert np.array_equal(mover.placement.slot_expert_LP, before)
    slow.intact = look
    while ranks.step()[0] is None:
        pass
    assert len(begun) == LAYERS
    assert np.array_equal(ranks.movers[0].placement.slot_expert_LP, target)


def test_staging_that_is_still_read_is_not_written():
    """As on a GPU, where the copies of the move before may be on their way into their slots."""
    rng = np.random.default_rng(5)
    ranks = Ranks(rng, 2)
    slow = ranks.movers[1].copies
    slow.free = lambda: False
    target = draw(rng, 2)
    for mover in ranks.movers:
        mover.begin(1, target)
    for _ in range(5):
        assert ranks.step() == [None, None]
    assert not ranks.area.any()
    del slow.free
    while ranks.step()[0] is None:
        pass
    assert ranks.area.any()


def test_what_cannot_be_moved_to_is_refused():
    rng = np.random.default_rng(4)
    ranks = Ranks(rng, 2, places=1)
    mover, now = ranks.movers[0], ranks.movers[0].placement.slot_expert_LP
    with pytest.raises(ConfigError, match=r"shape \(2, 8\); expected \(layers, slots\) = \(3, 8\)"):
        mover.begin(1, now[:2])
    lost = now.copy()
    lost[1][lost[1] == 2] = 3
    with pytest.raises(ConfigError, match="layer 1: expert 2 has no slot"):
        mover.begin(1, lost)
    lost[1][0] = now.max() + 1
    with pytest.raises(ConfigError, match=f"layer 1: no slot holds expert {now.max() + 1} now"):
        mover.begin(1, lost)
    with pytest.raises(ConfigError, match="experts to one rank, the staging holds 1"):
        mover.begin(1, np.roll(now, SLOTS, axis=1))
    assert not mover.busy
    mover.begin(1, now)
    with pytest.raises(ConfigError, match="placement 1 is still being moved to"):
        mover.begin(2, now)
