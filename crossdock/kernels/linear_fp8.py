"""A dense product in FP8: the masked or grouped kernels with one slot."""

from dataclasses import replace

import torch
from torch import Tensor

from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels.grouped_gemm import ALIGN, Segments
from crossdock.kernels.grouped_gemm_fp8 import grouped_gemm_fp8, is_hopper, masked_gemm_fp8
from crossdock.kernels.quant import dequantise_rows, dequantise_weights, quantise_rows
from crossdock.kernels.rounding import quantise_blocks_torch

FEW_ROWS = 64
"""Up to so many the masked kernel reads each weight once; on Hopper it takes any number."""
THIN_OUT = 8192
"""Outputs up to which few rows take tiles of 64 instead of 128 of them: one slot alone has too few
of the larger ones to keep a GPU's multiprocessors reading."""


def linear_fp8(x_TI: Tensor, w_OI: Tensor, scale_AB: Tensor) -> Tensor:
    """BF16 [T, O] of BF16 rows, quantised on the way per token and 128 channels.

    Args:
        x_TI: rows may be strided. Their width may be less than the weight's I, a multiple of 128,
            by less than 128: zeros are added.
        scale_AB: fp32 [ceil(O / 128), I / 128].
    """
    rows, device = x_TI.shape[0], x_TI.device
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    w_1OI, scale_1AB = w_OI.unsqueeze(0), scale_AB.unsqueeze(0)
    if rows <= FEW_ROWS or is_hopper(x_TI):
        q_TI, scale_TB = quantise_rows(x_TI)
        counts_1 = torch.full((1,), rows, dtype=torch.int32, device=device)
        x_1TI, scale_1TB = q_TI.unsqueeze(0), scale_TB.unsqueeze(0)
        thin = rows <= FEW_ROWS and w_OI.shape[0] <= THIN_OUT
        tile = replace(tiles.tile_for(tiles.MASKED_FP8, rows), bo=64) if thin else None
        return masked_gemm_fp8(x_1TI, scale_1TB, w_1OI, scale_1AB, counts_1, rows, tile)[0]
    q_NI, scale_NB = quantise_rows(x_TI, align=ALIGN)
    padded = len(q_NI)
    offsets_2 = torch.arange(0, padded + 1, padded, dtype=torch.int32, device=device)
    tile_slots_M = torch.zeros(padded // ALIGN, dtype=torch.int32, device=device)
    segments = Segments(offsets_2, tile_slots_M)
    return grouped_gemm_fp8(q_NI, scale_NB, w_1OI, scale_1AB, segments)[:rows]


def linear_fp8_twin(x_TI: Tensor, w_OI: Tensor, scale_AB: Tensor) -> Tensor:
    """fp32 [T, O]."""
    missing = w_OI.shape[1] - x_TI.shape[1]
    q_TI, scale_TB = quantise_blocks_torch(torch.nn.functional.pad(x_TI, (0, missing)))
    w = dequantise_weights(w_OI.unsqueeze(0), scale_AB.unsqueeze(0))[0]
    return dequantise_rows(q_TI, scale_TB) @ w.T
