"""Which copy serves whose tokens, so that every copy gets its quota and most tokens stay close.

Source: the rerouting of UltraEP (arXiv 2606.04101).
"""

import numpy as np


def reroute(tokens_RE: np.ndarray, slot_expert_P: np.ndarray, share_P: np.ndarray) -> np.ndarray:
    """`tokens_RP`, int64: how many of its tokens each rank sends to each slot, one layer.

    A rank fills its own copy first, up to the copy's quota; the rest goes to the copies with
    capacity left in proportion to it, by largest remainder, equal ones to the lowest slot. So a
    rank's tokens are all sent, and a slot's quota is kept to less than a token a rank.

    Args:
        tokens_RE: whole numbers, what each rank's tokens chose.
        share_P: of each slot in its expert's tokens, 1 over the slots of an expert.
    """
    num_ranks, num_experts = tokens_RE.shape
    there = np.flatnonzero(slot_expert_P >= 0)
    expert_Q, rank_Q = slot_expert_P[there], there * num_ranks // len(slot_expert_P)
    quota_Q = _whole(share_P[there] * tokens_RE.sum(axis=0)[expert_Q], expert_Q, num_experts)
    # Its own copies of a rank, slot after slot: what the ones before took is no longer there.
    left_RE, sent_RQ = tokens_RE.astype(np.int64), np.zeros((num_ranks, len(there)), np.int64)
    for q, (rank, expert) in enumerate(zip(rank_Q, expert_Q, strict=True)):
        sent_RQ[rank, q] = min(left_RE[rank, expert], quota_Q[q])
        left_RE[rank, expert] -= sent_RQ[rank, q]
    free_Q = quota_Q - sent_RQ.sum(axis=0)
    free_E = np.bincount(expert_Q, free_Q, num_experts)
    part_Q = free_Q / np.maximum(free_E[expert_Q], 1)
    for rank in range(num_ranks):
        sent_RQ[rank] += _whole(part_Q * left_RE[rank, expert_Q], expert_Q, num_experts)
    tokens_RP = np.zeros((num_ranks, len(slot_expert_P)), dtype=np.int64)
    tokens_RP[:, there] = sent_RQ
    return tokens_RP


def _whole(part_Q: np.ndarray, expert_Q: np.ndarray, num_experts: int) -> np.ndarray:
    """Rounds the parts of each expert so that their sum stays, by largest remainder."""
    whole_Q = np.floor(part_Q + 1e-9)
    missing_E = np.rint(np.bincount(expert_Q, part_Q - whole_Q, num_experts))
    # Slots of an expert together, those with the largest remainder first.
    order = np.lexsort((np.arange(len(part_Q)), whole_Q - part_Q, expert_Q))
    sorted_Q = expert_Q[order]
    first_E = np.searchsorted(sorted_Q, np.arange(num_experts))
    place_Q = np.arange(len(order)) - first_E[sorted_Q]
    whole_Q[order] += place_Q < missing_E[sorted_Q]
    return whole_Q.astype(np.int64)
