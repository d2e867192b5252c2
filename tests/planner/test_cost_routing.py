"""Expectations of routing, against drawing it."""

import math

import numpy as np
import pytest

from crossdock.balance import POLICIES
from crossdock.core import MoESpec
from crossdock.planner.cost import expected_imbalance, expected_places, zipf_loads


def moe(experts: int = 256, top_k: int = 8, groups: int = 1, chosen: int = 1) -> MoESpec:
    return MoESpec(experts, top_k, 2048, num_groups=groups, topk_groups=chosen)


def drawn_places(spec: MoESpec, places: int, tokens: int, rng: np.random.Generator) -> float:
    """Mean number of distinct places of a token's experts, chosen at random within its groups."""
    per_group = spec.num_experts // spec.num_groups
    held = spec.num_experts / places
    total = 0
    for _ in range(tokens):
        groups = rng.permutation(spec.num_groups)[: spec.topk_groups]
        pool = np.concatenate([np.arange(g * per_group, (g + 1) * per_group) for g in groups])
        experts = rng.choice(pool, spec.top_k, replace=False)
        total += len({int(e / held) for e in experts})
    return total / tokens


@pytest.mark.parametrize(("ranks", "published"), [(2, 1.993), (4, 3.614), (8, 5.295)])
def test_distinct_ranks_of_uniform_routing(ranks: int, published: float) -> None:
    # A token that all eight experts share a rank with needs one row: the published values.
    assert expected_places(moe(), ranks, grouped=False) == pytest.approx(published, abs=2e-3)


@pytest.mark.parametrize(
    ("spec", "places"),
    [
        (moe(), 16),
        (moe(64, 6), 8),
        (moe(groups=8, chosen=4), 2),
        (moe(groups=8, chosen=4), 4),
        (moe(groups=8, chosen=4), 8),
        (moe(groups=8, chosen=4), 32),
        (moe(160, 6, groups=8, chosen=3), 16),
        (moe(64, 4, groups=4, chosen=2), 2),
    ],
)
def test_places_agree_with_drawing(spec: MoESpec, places: int) -> None:
    drawn = drawn_places(spec, places, 4000, np.random.default_rng(places))
    assert expected_places(spec, places, grouped=True) == pytest.approx(drawn, rel=0.015)


def test_groups_confine_a_token_to_their_nodes() -> None:
    limited = moe(groups=8, chosen=4)
    assert expected_places(limited, 8, grouped=True) <= 4.0
    assert expected_places(limited, 8, grouped=False) > 5.0


def test_more_ranks_than_experts_reach_top_k() -> None:
    assert expected_places(moe(), 320, grouped=False) == pytest.approx(8.0)


def test_zipf_shares() -> None:
    shares_E = zipf_loads(64, 1.3)
    assert shares_E.sum() == pytest.approx(1.0)
    assert shares_E[0] / shares_E[7] == pytest.approx(8**1.3)


def test_imbalance_of_recorded_loads() -> None:
    # Experts 0 and 1 lie on rank 0: (5 + 3) of 12 against a mean of 6.
    load_LE = np.array([[5.0, 3.0, 1.0, 3.0]])
    assert expected_imbalance(moe(4, 2), 2, load_LE=load_LE) == pytest.approx(8 / 6)
    # Layers wait one after another, so that their skews average.
    two_LE = np.array([[5.0, 3.0, 1.0, 3.0], [3.0, 3.0, 3.0, 3.0]])
    assert expected_imbalance(moe(4, 2), 2, load_LE=two_LE) == pytest.approx((8 / 6 + 1) / 2)


def test_imbalance_without_skew_or_ranks() -> None:
    assert expected_imbalance(moe(), 1, zipf=2.0) == 1.0
    assert expected_imbalance(moe(), 32) == pytest.approx(1.0)


def test_imbalance_grows_with_skew_and_ranks() -> None:
    by_skew = [expected_imbalance(moe(), 32, zipf=z) for z in (0.0, 0.3, 0.6, 1.0)]
    assert by_skew == sorted(by_skew) and by_skew[-1] > 2
    by_ranks = [expected_imbalance(moe(), r, zipf=0.6) for r in (4, 16, 64)]
    assert by_ranks == sorted(by_ranks)


def test_chance_adds_to_few_rows() -> None:
    rng = np.random.default_rng(3)
    ranks, rows = 32, 64
    drawn = rng.multinomial(ranks * rows, [1 / ranks] * ranks, size=400).max(1).mean() / rows
    expected = expected_imbalance(moe(), ranks, rows_per_rank=rows)
    assert expected == pytest.approx(1 + math.sqrt(2 * math.log(ranks) / rows))
    assert drawn < expected < drawn + 0.12  # the bound is known to be a little high


def test_a_policy_flattens_the_loads() -> None:
    plain = expected_imbalance(moe(), 32, zipf=0.7, redundant_per_rank=1)
    placed = expected_imbalance(moe(), 32, zipf=0.7, redundant_per_rank=1, policy=POLICIES["eplb"])
    assert placed < 1.1 < 1.5 < plain
