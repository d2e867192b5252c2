"""What home does with the rows that come back. All transports use these, so their bits agree."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sum_rows(rows_MH: Tensor, index_N: Tensor, offsets_T: Tensor, dtype: torch.dtype) -> Tensor:
    """`out[t]` = the sum of `rows[i]` over i in `index[offsets[t] : offsets[t + 1]]`, in that
    order, in fp32, as `dtype`; zero where there are none."""
    if not len(index_N) or not len(offsets_T):
        return rows_MH.new_zeros(len(offsets_T), rows_MH.shape[1], dtype=dtype)
    if rows_MH.dtype != torch.float32:
        rows_MH = rows_MH.index_select(0, index_N).float()
        index_N = torch.arange(len(index_N), device=index_N.device)
    return F.embedding_bag(index_N, rows_MH, offsets_T, mode="sum").to(dtype)


def weigh_and_sum(y_TKH: Tensor, weights_TK: Tensor, slots_TK: Tensor) -> Tensor:
    """fp32 sum of `weights * y` over k ascending, as y's dtype. Where the slot is -1, y may hold
    anything.

    Products and sums are separate operations: fused ones round by an element's place.
    """
    if not y_TKH.shape[1]:
        return y_TKH.new_zeros(y_TKH.shape[0], y_TKH.shape[2])
    weighted = y_TKH.float() * weights_TK.unsqueeze(-1)
    weighted.masked_fill_((slots_TK < 0).unsqueeze(-1), 0.0)
    total_TH = weighted[:, 0]
    for k in range(1, weighted.shape[1]):
        total_TH = total_TH + weighted[:, k]
    return total_TH.to(y_TKH.dtype)
