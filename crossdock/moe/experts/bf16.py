"""Experts in BF16."""

import torch
from torch import Tensor

from crossdock.core import Masked
from crossdock.kernels.grouped_gemm_bf16 import grouped_bf16, grouped_gated_bf16
from crossdock.kernels.grouped_gemm_gather import gather_rows
from crossdock.kernels.masked_gemm_bf16 import masked_gated_bf16, masked_gemm_bf16
from crossdock.moe.context import MoEWeights
from crossdock.moe.experts.device import Wave


class Bf16Products:
    name = "bf16"

    def __init__(self, weights: MoEWeights):
        self._gate_up_SFH, self._down_SHF = weights.gate_up_SFH, weights.down_SHF
        self.slot_tensors = self._gate_up_SFH, self._down_SHF
        H, F = self._down_SHF.shape[1:]
        self.place_bytes = 2 * (2 * H + 3 * F)

    def grouped(self, wave: Wave) -> Tensor:
        x_WH, _ = gather_rows(wave.x_NH, None, wave.rows_W, wave.end)
        a_WF = grouped_gated_bf16(x_WH, self._gate_up_SFH, wave.segments)
        return grouped_bf16(a_WF, self._down_SHF, wave.segments)

    def masked(self, rows: Masked, rows_S: Tensor) -> Tensor:
        counts_S, expected = rows.counts_S, rows.expected_rows
        assert rows.x_SCH.dtype == torch.bfloat16
        a_SCF = masked_gated_bf16(rows.x_SCH, self._gate_up_SFH, counts_S, expected, rows_S)
        return masked_gemm_bf16(a_SCF, self._down_SHF, counts_S, expected)
