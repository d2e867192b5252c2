"""Experts in FP8 with a scale per 128x128 weights and per 128 channels of a row; own kernels."""

import torch
from torch import Tensor

from crossdock.core import Masked
from crossdock.kernels.grouped_gemm_fp8 import grouped_gemm_fp8, masked_gemm_fp8
from crossdock.kernels.quant import quantise_rows, swiglu_quantise, swiglu_quantise_masked
from crossdock.moe.context import MoEWeights
from crossdock.moe.experts.device import Wave


def fp8_place_bytes(weights: MoEWeights) -> int:
    """Gathered row, gate and up, their quantised product, output."""
    H, F = weights.down_SHF.shape[1:]
    return (H + F) * 33 // 32 + 2 * (2 * F + H)


class Fp8Products:
    name = "fp8, own kernels"

    def __init__(self, weights: MoEWeights):
        assert weights.gate_up_scale_SAB is not None and weights.down_scale_SAB is not None
        self._gate_up = weights.gate_up_SFH, weights.gate_up_scale_SAB
        self._down = weights.down_SHF, weights.down_scale_SAB
        self.slot_tensors = *self._gate_up, *self._down
        self.place_bytes = fp8_place_bytes(weights)

    def grouped(self, wave: Wave) -> Tensor:
        x_NH, scales_NG = quantised(wave.x_NH, wave.scales_NG)
        h_W2F = grouped_gemm_fp8(x_NH, scales_NG, *self._gate_up, wave.segments, wave.rows_W)
        return grouped_gemm_fp8(*swiglu_quantise(h_W2F, wave.end), *self._down, wave.segments)

    def masked(self, rows: Masked, rows_S: Tensor) -> Tensor:
        counts_S, expected = rows.counts_S, rows.expected_rows
        rows_S.add_(counts_S)
        x_SCH, scales_SCG = quantised(rows.x_SCH, rows.scales_SCG)
        h_SC2F = masked_gemm_fp8(x_SCH, scales_SCG, *self._gate_up, counts_S, expected)
        a_SCF, scales_SCB = swiglu_quantise_masked(h_SC2F, counts_S)
        return masked_gemm_fp8(a_SCF, scales_SCB, *self._down, counts_S, expected)


def quantised(x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP8 rows as they came; others quantised, undefined rows too."""
    if scales is not None:
        return x, scales
    assert x.dtype == torch.bfloat16
    q, s = quantise_rows(x.flatten(0, -2))
    return q.view(x.shape), s.view(*x.shape[:-1], -1)
