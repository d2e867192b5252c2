"""A limit on the tokens of an expert. It changes answers: what is over the limit is not computed.

Source: the expert capacity of GShard (arXiv 2006.16668) and Switch Transformers (arXiv 2101.03961,
section 2.2), but the lowest-weighted tokens are dropped, not the last ones.
"""

import math

import torch
from torch import Tensor


def limit_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Of an expert: `factor` times the mean, rounded up."""
    return max(1, math.ceil(factor * tokens * top_k / num_experts - 1e-9))


def keep_heaviest(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, limit: int) -> Tensor:
    """`kept_TK`, bool: false for what an expert has beyond its `limit` tokens of highest weight,
    the earlier one among equals. Nothing is read on the host."""
    by_weight = weights_TK.reshape(-1).sort(descending=True, stable=True)[1]
    ids, by_expert = ids_TK.reshape(-1).index_select(0, by_weight).sort(stable=True)
    count_E = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    count_E.scatter_add_(0, ids, torch.ones_like(ids))
    first_E = count_E.cumsum(0) - count_E
    place = torch.arange(len(ids), device=ids.device) - first_E.index_select(0, ids)
    kept = torch.empty(len(ids), dtype=torch.bool, device=ids.device)
    kept[by_weight.index_select(0, by_expert)] = place < limit
    return kept.view_as(ids_TK)
