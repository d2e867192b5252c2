"""Rows of the paged cache in torch: plain, or in E4M3 with an fp32 scale each, as `kernels.rope`
writes them. value = code * scale, and the scale is the row's largest magnitude over 448."""

import torch
from torch import Tensor

E4M3_MAX = 448.0
_FP8 = torch.float8_e4m3fn


def write_rows(rows_SD: Tensor, scales_S: Tensor | None, slots_T: Tensor, x_TD: Tensor) -> None:
    """x [T, ..., D] to slots of rows [S, ..., D]; scales [S, ...], None where rows are plain."""
    if scales_S is None:
        rows_SD.index_copy_(0, slots_T, x_TD)
        return
    x = x_TD.float()
    amax = x.abs().amax(-1, keepdim=True).clamp_(min=1e-10)
    codes = (x * (E4M3_MAX / amax)).clamp_(-E4M3_MAX, E4M3_MAX).to(_FP8)
    # As bytes, for which every operation is there on every device.
    rows_SD.view(torch.uint8).index_copy_(0, slots_T, codes.view(torch.uint8))
    scales_S.index_copy_(0, slots_T, (amax * (1 / E4M3_MAX)).squeeze(-1))


def read_rows(
    rows_SD: Tensor, scales_S: Tensor | None, slots_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """[N, ..., D] in `dtype`."""
    if scales_S is None:
        return rows_SD.index_select(0, slots_N).to(dtype)
    codes = rows_SD.view(torch.uint8).index_select(0, slots_N).view(_FP8)
    return codes.float().mul_(scales_S.index_select(0, slots_N).unsqueeze(-1)).to(dtype)
