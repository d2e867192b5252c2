"""Received rows, one copy per (row, slot), sorted by slot; and back.

received   x [N=2, H], slots [[0, 2], [1, 0]], S = 3
entries    (row, k) pairs with a slot, flat: 0 1 2 3, their slots 0 2 1 0
permuted   entries by slot: 0 3 | 2 | 1       counts_S 2 1 1
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core import Rows


@dataclass(frozen=True, eq=False)
class Permuted:
    """x_MH: M copies of rows sorted by slot. counts_S, ends_S: rows of each slot and where its
    segment ends. entry_M: each copy's received (row, k) pair, row * K + k; order_M: the sort."""

    x_MH: Tensor
    counts_S: Tensor
    ends_S: Tensor
    entry_M: Tensor
    order_M: Tensor


def permute(received: Rows, num_slots: int) -> Permuted:
    slots = received.slots_NK.reshape(-1)
    entries = (slots >= 0).nonzero().view(-1)
    slot, order_M = slots.index_select(0, entries).sort(stable=True)
    entry_M = entries.index_select(0, order_M)
    top_k = received.slots_NK.shape[1]
    row_M = torch.div(entry_M, top_k, rounding_mode="floor") if top_k > 1 else entry_M
    counts_S = torch.zeros(num_slots, dtype=torch.int64, device=slots.device)
    counts_S.scatter_add_(0, slot, torch.ones_like(slot))
    x_MH = received.x_NH.index_select(0, row_M)
    return Permuted(x_MH, counts_S, counts_S.cumsum(0), entry_M, order_M)


def unpermute(out_MH: Tensor, permuted: Permuted, received: Rows) -> Tensor:
    """[N, H], each row's experts weighted and summed in fp32; zero for rows without a slot."""
    slots_NK, weights_NK = received.slots_NK, received.weights_NK
    if not out_MH.shape[0]:
        return out_MH.new_zeros(len(slots_NK), out_MH.shape[1])
    back_M = torch.empty_like(permuted.order_M)
    back_M.scatter_(0, permuted.order_M, torch.arange(len(back_M), device=back_M.device))
    chosen_NK = slots_NK >= 0
    count_N = chosen_NK.sum(1)
    y_NH = F.embedding_bag(
        back_M,
        out_MH.float(),
        count_N.cumsum(0) - count_N,
        mode="sum",
        per_sample_weights=weights_NK[chosen_NK],
    )
    return y_NH.to(out_MH.dtype)


def unpermute_per_expert(out_MH: Tensor, permuted: Permuted, received: Rows) -> Tensor:
    """[N, K, H], unweighted; undefined where the slot is -1."""
    N, K = received.slots_NK.shape
    y_EH = out_MH.new_empty(N * K, out_MH.shape[1])
    return y_EH.index_copy_(0, permuted.entry_M, out_MH).view(N, K, out_MH.shape[1])
