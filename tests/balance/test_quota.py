"""Quotas, what LLEP spills, and which rank's tokens go to which copy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.balance import POLICIES, Problem, imbalance, reroute
from crossdock.balance.generate import draw_loads, rank_ratio, zipf_weights


def made_load(ranks, experts, ratio, rng, tokens=512):
    weight_E = zipf_weights(experts, ranks, 8, ratio, rng)
    return draw_loads(weight_E, tokens * ranks, 8, rng)[None]


def test_the_generator_reaches_its_ratio_and_gives_every_token_k_experts():
    rng = np.random.default_rng()
    for ratio in (1.5, 2.0, 3.0):
        weight_E = zipf_weights(64, 16, 8, ratio, rng)
        assert rank_ratio(weight_E.reshape(16, -1), 8) == pytest.approx(ratio, rel=1e-6)
        load_E = draw_loads(weight_E, 8192, 8, rng)
        assert load_E.sum() == 8192 * 8 and load_E.max() <= 8192
        load_R = load_E.reshape(16, -1).sum(axis=1)
        assert load_R.max() / load_R.mean() == pytest.approx(ratio, rel=0.05)
    with pytest.raises(ValueError, match=r"ratio 40"):
        zipf_weights(64, 16, 8, 40.0, rng)


def test_tokens_take_experts_by_weight():
    """One of k: exactly in proportion to the weights."""
    weight_E = np.array([1.0, 2.0, 3.0, 4.0])
    load_E = draw_loads(weight_E, 40_000, 1, np.random.default_rng())
    assert load_E == pytest.approx(weight_E * 4000, abs=600)  # six standard deviations


@pytest.mark.parametrize(("ratio", "most"), [(1.5, 41), (2.0, 49), (3.0, 54)])
def test_quota_at_64_ranks(ratio, most):
    rng = np.random.default_rng()
    load_LE = np.concatenate([made_load(64, 256, ratio, rng) for _ in range(5)])
    answer = POLICIES["quota"](Problem(load_LE, 64, 6))
    assert imbalance(load_LE, answer, 64).mean() <= 1.011
    # Over five standard deviations: one load's scatter by 1.8.
    assert (answer.slot_expert_LP >= 0).sum(axis=1).mean() - 256 <= most + 4


def test_homes_stay_and_keep_tokens():
    rng = np.random.default_rng()
    load_LE = made_load(16, 64, 2.5, rng)
    first = POLICIES["quota"](Problem(load_LE, 16, 6))
    homes = first.slot_expert_LP[0].reshape(16, 6)[:, :4]
    assert homes.tolist() == np.arange(64).reshape(16, 4).tolist()
    # From another load the same homes serve, and replicas that are wanted again keep their slot.
    other_LE = rng.poisson(load_LE * 1.1)
    second = POLICIES["quota"](Problem(other_LE, 16, 6, current_LP=first.slot_expert_LP))
    assert (second.slot_expert_LP[0].reshape(16, 6)[:, :4] == homes).all()
    share_PR = second.share_LP[0].reshape(16, 6)[:, :4]
    assert (share_PR[other_LE[0].reshape(16, 4) > 0] > 0).all()
    for old, new in zip(
        first.slot_expert_LP[0].reshape(16, 6),
        second.slot_expert_LP[0].reshape(16, 6),
        strict=True,
    ):
        for slot in (4, 5):
            if old[slot] >= 0 and old[slot] in new:
                assert new[slot] == old[slot]


def test_loads_that_are_no_whole_numbers_are_planned_as_finely():
    load_LE = made_load(16, 64, 2.0, np.random.default_rng())
    whole = POLICIES["quota"](Problem(load_LE, 16, 6))
    parts_LE = load_LE / load_LE.sum()
    part = POLICIES["quota"](Problem(parts_LE, 16, 6))
    most = imbalance(load_LE, whole, 16)[0]
    assert imbalance(parts_LE, part, 16)[0] == pytest.approx(most, abs=0.02)


def test_llep_with_room_everywhere_evens_out_by_moving_each_rank_s_excess():
    load_LE = made_load(16, 64, 2.0, np.random.default_rng())
    answer = POLICIES["llep"](Problem(load_LE, 16, 64))
    assert imbalance(load_LE, answer, 16)[0] == pytest.approx(1.0, abs=0.02)
    even_LE = np.full((1, 64), 100)
    kept = POLICIES["llep"](Problem(even_LE, 16, 64))
    assert (kept.slot_expert_LP >= 0).sum() == 64


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rerouting_sends_every_token_and_keeps_quotas(seed):
    rng = np.random.default_rng(seed)
    ranks, experts, slots = 8, 16, 3
    tokens_RE = rng.poisson(rng.gamma(0.4, 30, (1, experts)), (ranks, experts))
    answer = POLICIES["quota"](Problem(tokens_RE.sum(axis=0)[None], ranks, slots))
    row_P, share_P = answer.slot_expert_LP[0], answer.share_LP[0]
    sent_RP = reroute(tokens_RE, row_P, share_P)
    assert sent_RP.min() >= 0 and not sent_RP[:, row_P < 0].any()
    back_RE = np.zeros_like(tokens_RE)
    for slot in np.flatnonzero(row_P >= 0):
        back_RE[:, row_P[slot]] += sent_RP[:, slot]
    assert (back_RE == tokens_RE).all()
    quota_P = np.where(row_P >= 0, share_P * tokens_RE.sum(axis=0)[row_P], 0)
    assert (np.abs(sent_RP.sum(axis=0) - quota_P) < ranks).all()
    for rank in range(ranks):  # its own copy serves it first
        for slot in range(rank * slots, (rank + 1) * slots):
            if row_P[slot] >= 0:
                quota = np.floor(quota_P[slot] + 1e-9)
                assert sent_RP[rank, slot] >= min(tokens_RE[rank, row_P[slot]], quota)


def test_rerouting_by_hand():
    # Expert 0 on both ranks, half each; rank 0 has 6 of its 8 tokens. Expert 1 on rank 1 alone.
    sent_RP = reroute(
        np.array([[6, 1], [2, 5]]), np.array([0, -1, 1, 0]), np.array([0.5, 0.0, 1.0, 0.5])
    )
    assert sent_RP.tolist() == [[4, 0, 1, 2], [0, 0, 5, 2]]
