"""How many places a token's experts lie in, and how uneven the ranks' shares are. Expectations."""

from functools import lru_cache
from math import comb, exp, lgamma, log, sqrt

import numpy as np

from crossdock.balance import linear_placement
from crossdock.balance.base import Policy, Problem
from crossdock.core import MoESpec


@lru_cache(maxsize=4096)
def expected_places(moe: MoESpec, places: int, grouped: bool) -> float:
    """Distinct places (ranks or nodes) that hold a token's K experts, if E experts lie evenly over
    `places` and every expert is as likely as another.

    `grouped`: whether places hold whole groups of experts or lie within one, so that group-limited
    routing (DeepSeek-V3, section 2.1.2) confines a token to few. With more places than experts the
    slots left over hold replicas of which a token takes one, so that the answer stays below K.
    """
    if places == 1:
        return 1.0
    held = moe.num_experts / places
    if not grouped or moe.num_groups == 1 or moe.topk_groups >= moe.num_groups:
        return places * _hit(moe.num_experts, held, moe.top_k)
    per_group = moe.num_experts / moe.num_groups
    pool = moe.topk_groups * per_group
    whole, rest = divmod(held / per_group, 1.0)
    whole = int(whole)
    miss = 0.0
    for chosen in range(min(whole, moe.topk_groups) + 1):
        ways = comb(whole, chosen) * comb(moe.num_groups - whole, moe.topk_groups - chosen)
        likely = ways / comb(moe.num_groups, moe.topk_groups)
        left = moe.num_groups - whole
        partial = (moe.topk_groups - chosen) / left if left else 0.0
        with_rest = 1 - _hit(pool, (chosen + rest) * per_group, moe.top_k)
        without = 1 - _hit(pool, chosen * per_group, moe.top_k)
        miss += likely * (partial * with_rest + (1 - partial) * without)
    return places * (1 - miss)


def _hit(pool: float, held: float, k: int) -> float:
    """Chance that k distinct of `pool` experts include one of `held` (less than one: a replica)."""
    if held < 1.0:
        return k * held / pool
    if pool - held < k:
        return 1.0
    misses = lgamma(pool - held + 1) - lgamma(pool - held - k + 1)
    return 1.0 - exp(misses - lgamma(pool + 1) + lgamma(pool - k + 1))


def zipf_loads(num_experts: int, exponent: float) -> np.ndarray:
    """Shares [E] of the experts' load, the i-th most popular proportional to i**-exponent."""
    shares_E = np.arange(1, num_experts + 1, dtype=float) ** -exponent
    return shares_E / shares_E.sum()


def expected_imbalance(
    moe: MoESpec,
    ranks: int,
    *,
    zipf: float = 0.0,
    load_LE: np.ndarray | None = None,
    redundant_per_rank: int = 0,
    rows_per_rank: float = float("inf"),
    policy: Policy | None = None,
) -> float:
    """Most loaded rank over the mean one, in the mean over layers, each of which waits for its own.

    Args:
        zipf: exponent of the law of the experts' loads, assigned to experts at random (seed 0) in
            16 layers; or else `load_LE`, loads as they were recorded.
        rows_per_rank: a step's mean rows on a rank, whose chance spread is added: the maximum of R
            normal variables lies sqrt(2 ln R) deviations above their mean.
        policy: places experts for these very loads (`crossdock.balance.POLICIES`); without one they
            lie in order. Real loads drift, so that what a policy leaves is a lower bound.
    """
    if ranks == 1:
        return 1.0
    if load_LE is None:
        load_LE = _zipf_layers(moe.num_experts, zipf)
    slots = -(-moe.num_experts // ranks) + redundant_per_rank
    share_LP = None
    if policy is None:
        redundant = slots * ranks - moe.num_experts
        slots_LP = linear_placement(len(load_LE), moe.num_experts, ranks, redundant).slot_expert_LP
    else:
        answer = policy(Problem(load_LE, ranks, slots))
        slots_LP, share_LP = answer.slot_expert_LP, answer.share_LP
    skews = [
        _max_over_mean(slots_P, None if share_LP is None else share_LP[layer], load_E, ranks)
        for layer, (slots_P, load_E) in enumerate(zip(slots_LP, load_LE, strict=True))
    ]
    return float(np.mean(skews)) * (1 + sqrt(2 * log(ranks) / rows_per_rank))


def _zipf_layers(num_experts: int, exponent: float, layers: int = 16) -> np.ndarray:
    rng = np.random.default_rng(0)
    shares_E = zipf_loads(num_experts, exponent)
    return np.stack([rng.permutation(shares_E) for _ in range(layers)])


def _max_over_mean(
    slots_P: np.ndarray, share_P: np.ndarray | None, load_E: np.ndarray, ranks: int
) -> float:
    held = slots_P >= 0
    if share_P is None:
        copies_E = np.bincount(slots_P[held], minlength=len(load_E))
        share_P = np.where(held, 1.0 / np.maximum(copies_E[slots_P], 1), 0.0)
    load_R = np.where(held, load_E[slots_P] * share_P, 0.0).reshape(ranks, -1).sum(1)
    return float(load_R.max() / load_R.mean())
