"""Products of rows with the weights of their slots: layouts and torch twins.

*grouped*: rows sorted by slot, each slot's segment starting at a multiple of 128; *masked*:
[S, C, I] of which slot s uses the first counts_S[s] rows. Example with three slots of 2, 0 and
130 rows: offsets 0, 128, 128, 384; tile slots 0, 2, 2. Letters as in `quant`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ALIGN = 128


@dataclass(frozen=True, eq=False)
class Segments:
    """Where each slot's rows lie in a grouped buffer; int32, on the device."""

    offsets_S1: Tensor
    """[S + 1] starts, multiples of 128; the last one is the number of rows in use."""
    tile_slots_M: Tensor
    """[rows / 128] slot of each 128 rows; S or more from the rows in use on."""


def segments_of(counts_S: Tensor, rows: int) -> Segments:
    """Segments of a buffer of `rows` (a multiple of 128), without a host synchronisation.

    The caller sizes the buffer: sum(counts) + 127 * S rows always suffice.
    """
    if rows % ALIGN:
        raise ValueError(f"a grouped buffer's rows must be a multiple of {ALIGN}; got {rows}")
    padded_S = (counts_S + (ALIGN - 1)) // ALIGN * ALIGN
    offsets_S1 = torch.zeros(len(counts_S) + 1, dtype=torch.int32, device=counts_S.device)
    torch.cumsum(padded_S, 0, dtype=torch.int32, out=offsets_S1[1:])
    starts_M = torch.arange(0, rows, ALIGN, dtype=torch.int32, device=counts_S.device)
    tile_slots_M = torch.searchsorted(offsets_S1[1:], starts_M, right=True, out_int32=True)
    return Segments(offsets_S1, tile_slots_M)


def grouped_gemm_twin(x_NI: Tensor, w_SOI: Tensor, segments: Segments) -> Tensor:
    """fp32 in, fp32 out (dequantise first); NaN in rows that no slot owns. Synchronises."""
    out_NO = x_NI.new_full((x_NI.shape[0], w_SOI.shape[1]), float("nan"))
    starts = segments.offsets_S1.tolist()
    for slot, (start, end) in enumerate(pairwise(starts)):
        out_NO[start:end] = x_NI[start:end] @ w_SOI[slot].T
    return out_NO


def masked_gemm_twin(x_SCI: Tensor, w_SOI: Tensor, counts_S: Tensor) -> Tensor:
    """fp32 in, fp32 out; NaN in rows beyond the counts."""
    out_SCO = x_SCI @ w_SOI.transpose(1, 2)
    beyond_SC = torch.arange(x_SCI.shape[1], device=x_SCI.device) >= counts_S[:, None]
    return out_SCO.masked_fill_(beyond_SC[..., None], float("nan"))
