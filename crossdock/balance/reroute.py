"""Which copy serves whose tokens, so that every copy gets its quota and most tokens stay close.

Source: the rerouting of UltraEP (arXiv 2606.04101). Where copies stay as they are, quotas come from
block coordinate descent on the squared loads of the ranks, an expert a block, whose exact step is
water-filling; the descent ends at the least maximum, too. In whole numbers throughout, so that the
form on the device (`kernels.reroute`) gives the same to the token.
"""

import numpy as np

SWEEPS = 2
"""Of the descent over all experts. On UltraEP's loads at EP64, one leaves 1.03 to 1.15 of the mean
load on the fullest rank, two 1.02 to 1.05, and the optimum is 1.00 to 1.045."""


def fill_quotas(
    tokens_E: np.ndarray, slot_expert_P: np.ndarray, num_ranks: int, sweeps: int = SWEEPS
) -> np.ndarray:
    """`quota_P`, int64: tokens that each slot of a layer is to serve, ranks loaded evenly.

    Each expert with copies on several ranks starts with equal parts; then, one after another, takes
    its tokens back and fills the ranks that hold it up to a common level. What does not divide goes
    to the lowest ranks. Of several copies on one rank the first serves all.

    Args:
        tokens_E: whole numbers. slot_expert_P: -1 for an empty slot; each expert has one.
    """
    num_experts, slots = len(tokens_E), len(slot_expert_P) // num_ranks
    slot_ER = np.full((num_experts, num_ranks), -1)
    for slot in reversed(np.flatnonzero(slot_expert_P >= 0)):
        slot_ER[slot_expert_P[slot], slot // slots] = slot
    host_ER = slot_ER >= 0
    count_E = host_ER.sum(axis=1)
    each_E, rest_E = np.divmod(tokens_E.astype(np.int64), count_E)
    extra_ER = host_ER & (host_ER.cumsum(axis=1) <= rest_E[:, None])
    quota_ER = np.where(host_ER, each_E[:, None], 0) + extra_ER
    load_R = quota_ER.sum(axis=0)
    for _ in range(sweeps):
        for expert in np.flatnonzero(count_E > 1):
            load_R -= quota_ER[expert]
            quota_ER[expert] = _fill(int(tokens_E[expert]), load_R, host_ER[expert])
            load_R += quota_ER[expert]
    quota_P = np.zeros(len(slot_expert_P), dtype=np.int64)
    quota_P[slot_ER[host_ER]] = quota_ER[host_ER]
    return quota_P


def _fill(tokens: int, load_R: np.ndarray, host_R: np.ndarray) -> np.ndarray:
    """The lowest of the hosts' loads raised to one level."""
    below_R = host_R
    while True:
        total, count = tokens + int(load_R[below_R].sum()), int(below_R.sum())
        level = total // count
        still_R = below_R & (load_R <= level)
        if still_R.sum() == count:
            break
        below_R = still_R
    extra_R = below_R & (below_R.cumsum() <= total - level * count)
    return np.where(below_R, level - load_R, 0) + extra_R


def reroute(tokens_RE: np.ndarray, slot_expert_P: np.ndarray, share_P: np.ndarray) -> np.ndarray:
    """As `reroute_quotas`, with `share_P` of each slot in its expert's tokens, 1 over the slots of
    an expert, made whole tokens by largest remainder."""
    there = np.flatnonzero(slot_expert_P >= 0)
    expert_Q = slot_expert_P[there]
    part_Q = share_P[there] * tokens_RE.sum(axis=0)[expert_Q]
    quota_P = np.zeros(len(slot_expert_P), dtype=np.int64)
    whole_Q = np.floor(part_Q + 1e-9)
    quota_P[there] = _with_rest(whole_Q, part_Q - whole_Q, expert_Q, tokens_RE.shape[1])
    return reroute_quotas(tokens_RE, slot_expert_P, quota_P)


def reroute_quotas(
    tokens_RE: np.ndarray, slot_expert_P: np.ndarray, quota_P: np.ndarray
) -> np.ndarray:
    """`tokens_RP`, int64: how many of its tokens each rank sends to each slot, one layer.

    A rank fills its own copy first, up to the copy's quota; the rest goes to the copies with
    capacity left in proportion to it, by largest remainder, equal ones to the lowest slot. So a
    rank's tokens are all sent, and a slot's quota is kept to less than a token a rank.

    Args:
        tokens_RE: whole numbers, what each rank's tokens chose.
        quota_P: whole numbers whose sum over an expert's slots is that of its tokens.
    """
    num_ranks, num_experts = tokens_RE.shape
    there = np.flatnonzero(slot_expert_P >= 0)
    expert_Q, rank_Q = slot_expert_P[there], there * num_ranks // len(slot_expert_P)
    # Its own copies of a rank, slot after slot: what the ones before took is no longer there.
    left_RE, sent_RQ = tokens_RE.astype(np.int64), np.zeros((num_ranks, len(there)), np.int64)
    free_Q = quota_P[there].astype(np.int64)
    for q, (rank, expert) in enumerate(zip(rank_Q, expert_Q, strict=True)):
        sent_RQ[rank, q] = min(left_RE[rank, expert], free_Q[q])
        left_RE[rank, expert] -= sent_RQ[rank, q]
        free_Q[q] -= sent_RQ[rank, q]
    free_E = np.zeros(num_experts, np.int64)
    np.add.at(free_E, expert_Q, free_Q)
    for rank in range(num_ranks):
        whole_Q, rest_Q = np.divmod(
            free_Q * left_RE[rank, expert_Q], np.maximum(free_E[expert_Q], 1)
        )
        rest_Q = rest_Q / np.maximum(free_E[expert_Q], 1)
        sent_RQ[rank] += _with_rest(whole_Q, rest_Q, expert_Q, num_experts)
    tokens_RP = np.zeros((num_ranks, len(slot_expert_P)), dtype=np.int64)
    tokens_RP[:, there] = sent_RQ
    return tokens_RP


def _with_rest(
    whole_Q: np.ndarray, rest_Q: np.ndarray, expert_Q: np.ndarray, num_experts: int
) -> np.ndarray:
    """Whole parts, one more for the largest rests: as many as an expert's amount to."""
    missing_E = np.rint(np.bincount(expert_Q, rest_Q, num_experts))
    # Slots of an expert together, those with the largest remainder first.
    order = np.lexsort((np.arange(len(rest_Q)), -rest_Q, expert_Q))
    sorted_Q = expert_Q[order]
    first_E = np.searchsorted(sorted_Q, np.arange(num_experts))
    place_Q = np.arange(len(order)) - first_E[sorted_Q]
    more_Q = np.zeros(len(order), dtype=np.int64)
    more_Q[order] = place_Q < missing_E[sorted_Q]
    return whole_Q.astype(np.int64) + more_Q
