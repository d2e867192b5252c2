"""Experts in FP8 through DeepGEMM (the `deepgemm` extra); Hopper, kernels compiled at first use."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from crossdock.core import Masked
from crossdock.kernels.grouped_gemm_gather import gather_rows
from crossdock.kernels.quant import swiglu_quantise, swiglu_quantise_masked
from crossdock.moe.context import MoEWeights
from crossdock.moe.experts.device import Wave
from crossdock.moe.experts.fp8 import fp8_place_bytes, quantised


def deepgemm_found(device: torch.device) -> bool:
    """Whether it is installed and made for this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return importlib.util.find_spec("deep_gemm") is not None


class DeepGemmProducts:
    name = "fp8, DeepGEMM"

    def __init__(self, weights: MoEWeights):
        import deep_gemm

        assert weights.gate_up_scale_SAB is not None and weights.down_scale_SAB is not None
        self._library: Any = deep_gemm
        self._gate_up = weights.gate_up_SFH, weights.gate_up_scale_SAB
        self._down = weights.down_SHF, weights.down_scale_SAB
        self.slot_tensors = *self._gate_up, *self._down
        self.place_bytes = fp8_place_bytes(weights)

    def grouped(self, wave: Wave) -> Tensor:
        x_NH, scales_NG = quantised(wave.x_NH, wave.scales_NG)
        x_WH, scales_WG = gather_rows(x_NH, scales_NG, wave.rows_W, wave.end)
        tiles_M, slots = wave.segments.tile_slots_M, len(self._gate_up[0])
        # It skips tiles whose first row belongs to nobody.
        slots_W = torch.where(tiles_M < slots, tiles_M, -1).repeat_interleave(128)
        h_W2F = self._contiguous((x_WH, scales_WG), self._gate_up, slots_W)
        return self._contiguous(swiglu_quantise(h_W2F, wave.end), self._down, slots_W)

    def masked(self, rows: Masked, rows_S: Tensor) -> Tensor:
        counts_S, expected = rows.counts_S, rows.expected_rows
        rows_S.add_(counts_S)
        x = quantised(rows.x_SCH, rows.scales_SCG)
        h_SC2F = self._masked(x, self._gate_up, counts_S, expected)
        a = swiglu_quantise_masked(h_SC2F, counts_S)
        return self._masked(a, self._down, counts_S, expected)

    def _contiguous(self, x: tuple[Any, ...], w: tuple[Tensor, Tensor], slots_W: Tensor) -> Tensor:
        out = x[0].new_empty((len(x[0]), w[0].shape[1]), dtype=torch.bfloat16)
        self._library.m_grouped_fp8_gemm_nt_contiguous(x, w, out, slots_W, disable_ue8m0_cast=True)
        return out

    def _masked(
        self, x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], counts_S: Tensor, expected: int
    ) -> Tensor:
        out = x[0].new_empty((*x[0].shape[:2], w[0].shape[1]), dtype=torch.bfloat16)
        self._library.fp8_m_grouped_gemm_nt_masked(
            x, w, out, counts_S, expected, disable_ue8m0_cast=True
        )
        return out
