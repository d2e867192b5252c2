"""Experts over `Rows`: permute, a grouped product, unpermute; the host knows how many rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core import Received, Rows
from crossdock.layers import choose_products
from crossdock.moe.context import MoEContext, MoEWeights
from crossdock.moe.permute import Permuted, permute, unpermute, unpermute_per_expert

_FEW_ROWS = 8


class GroupedProduct:
    """One grouped product per projection over all slots.

    On the CPU faster than a loop over slots or a padded batch: 505 us against 540 and 550 for 128
    rows on 32 experts of [64, 256] in float32 whose weights come from memory; transposed once,
    since the product then needs not do so at every call (673 us). It visits empty slots too, so a
    handful of rows goes slot by slot (31 us against 65 for 4 rows).
    """

    def __init__(self, weights: MoEWeights, context: MoEContext):
        self._gate_up_SHF = weights.gate_up_SFH.transpose(1, 2)
        self._down_SFH = weights.down_SHF.transpose(1, 2)
        if context.device.type == "cpu":
            self._gate_up_SHF = self._gate_up_SHF.contiguous()
            self._down_SFH = self._down_SFH.contiguous()
        on_cpu = context.device.type == "cpu"
        self.slot_tensors = (
            (self._gate_up_SHF, self._down_SFH)
            if on_cpu
            else (weights.gate_up_SFH, weights.down_SHF)
        )
        self._swiglu = choose_products(False).swiglu
        # Views of the same memory.
        gate_up_SFH, down_SHF = self._gate_up_SHF.transpose(1, 2), self._down_SFH.transpose(1, 2)
        self._few = SlotBySlot(gate_up_SFH, down_SHF, context)
        self._few_rows = _FEW_ROWS if context.device.type == "cpu" else 0

    def __call__(self, permuted: Permuted) -> Tensor:
        if permuted.x_MH.shape[0] <= self._few_rows:
            return self._few(permuted)
        ends_S = permuted.ends_S.to(torch.int32)
        h_MF = F.grouped_mm(permuted.x_MH, self._gate_up_SHF, offs=ends_S)
        return F.grouped_mm(self._swiglu(h_MF), self._down_SFH, offs=ends_S)


class SlotBySlot:
    """Slot after slot through the model's own `matmul`: a row's bits are then those that the row
    alone would get wherever `matmul` is invariant. Reads the counts on the host."""

    def __init__(self, gate_up_SFH: Tensor, down_SHF: Tensor, context: MoEContext):
        self.slot_tensors = gate_up_SFH, down_SHF
        self._slots = list(zip(gate_up_SFH, down_SHF, strict=True))
        self._matmul = context.matmul
        self._swiglu = choose_products(context.invariant).swiglu

    def __call__(self, permuted: Permuted) -> Tensor:
        out_MH = torch.empty_like(permuted.x_MH)
        start = 0
        for (gate_up_FH, down_HF), end in zip(self._slots, permuted.ends_S.tolist(), strict=True):
            if end > start:
                h_NF = self._matmul(permuted.x_MH[start:end], gate_up_FH, None)
                out_MH[start:end] = self._matmul(self._swiglu(h_NF), down_HF, None)
            start = end
        return out_MH


class FixedTiles:
    """All slots in one launch per projection, by kernels of fixed tiles: a row's bits are its own.
    For invariant mode on GPUs."""

    def __init__(self, weights: MoEWeights):
        self.slot_tensors = weights.gate_up_SFH, weights.down_SHF
        self._swiglu = choose_products(True).swiglu

    def __call__(self, permuted: Permuted) -> Tensor:
        # Imports triton, which ranks on CPUs do without.
        from crossdock.kernels.linear_invariant import grouped_linear_invariant, tile_ends

        gate_up_SFH, down_SHF = self.slot_tensors
        ends_S = permuted.ends_S
        tiles_S = tile_ends(ends_S, permuted.x_MH.dtype)
        h_MF = grouped_linear_invariant(permuted.x_MH, gate_up_SFH, ends_S, tiles_S)
        return grouped_linear_invariant(self._swiglu(h_MF), down_SHF, ends_S, tiles_S)


class RowExperts:
    """y_NH, reduced, or y_NKH per expert. `rows_at_once`: more are worked on in pieces. rows_S:
    where the rows of each slot are counted."""

    def __init__(
        self,
        product: GroupedProduct | SlotBySlot | FixedTiles,
        per_expert: bool,
        rows_at_once: int,
        rows_S: Tensor,
    ):
        self.product, self.rows_at_once = product, rows_at_once
        self._per_expert, self._rows_S = per_expert, rows_S
        self.slot_tensors = product.slot_tensors

    def __call__(self, received: Received) -> Tensor:
        assert isinstance(received, Rows)
        (N, H), step = received.x_NH.shape, self.rows_at_once
        if N == 0:
            return received.x_NH.view(*(received.slots_NK.shape if self._per_expert else (0,)), H)
        if step >= N:
            return self._piece(received)
        parts = zip(
            received.x_NH.split(step),
            received.slots_NK.split(step),
            received.weights_NK.split(step),
            strict=True,
        )
        return torch.cat([self._piece(Rows(*part)) for part in parts])

    def _piece(self, rows: Rows) -> Tensor:
        permuted = permute(rows, self._rows_S.shape[0])
        self._rows_S.add_(permuted.counts_S)
        out_MH = self.product(permuted)
        restore = unpermute_per_expert if self._per_expert else unpermute
        return restore(out_MH, permuted, rows)
