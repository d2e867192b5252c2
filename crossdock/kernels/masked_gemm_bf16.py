# mypy: disable-error-code="no-untyped-def"
"""BF16 products over masked rows, of which decoding has few per slot: bound by reading weights.

Weights are the tensor core's left operand: 64 or more of their rows fill its M, which a handful of
tokens could not. The gated product reads a slot's rows of gate and the matching rows of up in one
program and writes silu(gate) * up, so that neither goes through memory:

    w [S, 2F, I], a program's tile of 64: rows o .. o + 63 and F + o .. F + o + 63 of its slot

The gated product comes right after the dispatch that counts its rows: it also adds them to the
totals of the slots, for which another kernel would come between the two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels.grouped_gemm_fp8 import check_counts, check_shapes
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows


@triton.jit
def _slot_rows(
    x_desc, w_desc, out_ptr, slot, o, count, capacity, out_width, width: tl.constexpr,
    GATED: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = o + tl.arange(0, BO)
    gate_row = slot * (2 * out_width if GATED else out_width) + o
    start = 0
    while start < count:
        acc_OM = tl.zeros((BO, BM), tl.float32)
        up_OM = tl.zeros((BO, BM), tl.float32)
        for col in tl.range(0, width, BK, num_stages=STAGES):
            x_MK = x_desc.load([slot * capacity + start, col])
            w_OK = w_desc.load([gate_row, col])
            if INTERPRET:  # its products of BF16 multiply the bits
                x_MK = x_MK.to(tl.float32)
                w_OK = w_OK.to(tl.float32)
            acc_OM = tl.dot(w_OK, x_MK.T, acc_OM)
            if GATED:
                up_OK = w_desc.load([gate_row + out_width, col])
                if INTERPRET:
                    up_OK = up_OK.to(tl.float32)
                up_OM = tl.dot(up_OK, x_MK.T, up_OM)
        if GATED:
            acc_OM = acc_OM / (1.0 + tl.exp(-acc_OM)) * up_OM
        value_MO = tl.trans(cast_rows(acc_OM, tl.bfloat16, INTERPRET))
        in_slot = start + tl.arange(0, BM)
        rows = slot.to(tl.int64) * capacity + in_slot
        at = out_ptr + rows[:, None] * out_width + cols[None, :]
        tl.store(at, value_MO, mask=(in_slot < count)[:, None] & (cols < out_width)[None, :])
        start += BM


@triton.jit
def masked_bf16_kernel(
    x_desc, x_more_desc, w_desc, out_ptr, counts_ptr, rows_ptr, capacity, out_width,
    width: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, MORE_STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (block of O, slot), down the slot's rows: none is launched for rows that
    a slot does not have, and the weights are read from memory once where BM covers the count. Slots
    with more rows take tiles of MORE rows (0: of BM as well). The counts are added to rows_ptr,
    unless that is None."""
    o = tl.program_id(0) * BO
    slot = tl.program_id(1)
    count = tl.load(counts_ptr + slot)
    if rows_ptr is not None and o == 0:
        tl.store(rows_ptr + slot, tl.load(rows_ptr + slot) + count)
    if MORE and count > BM:
        _slot_rows(
            x_more_desc, w_desc, out_ptr, slot, o, count, capacity, out_width, width,
            GATED, MORE, BO, BK, MORE_STAGES,
        )  # fmt: skip
    else:
        _slot_rows(
            x_desc, w_desc, out_ptr, slot, o, count, capacity, out_width, width,
            GATED, BM, BO, BK, STAGES,
        )  # fmt: skip


def masked_gemm_bf16(
    x_SCI: Tensor,
    w_SOI: Tensor,
    counts_S: Tensor,
    expected_rows: int,
    tile: tiles.MaskedTile | None = None,
) -> Tensor:
    """BF16 [S, C, O]; counts_S int32 on the device, rows beyond a count are unwritten.

    I is a multiple of 64. expected_rows only picks the tile: any counts up to C are right with any
    of them. Raises: ValueError: dtypes or shapes other than these.
    """
    tile = tile or tiles.tile_for(tiles.MASKED_BF16, expected_rows)
    return _launch(tile, x_SCI, w_SOI, counts_S, w_SOI.shape[1], False, None)


def masked_gated_bf16(
    x_SCI: Tensor,
    w_S2FI: Tensor,
    counts_S: Tensor,
    expected_rows: int,
    rows_S: Tensor | None = None,
    tile: tiles.MaskedTile | None = None,
) -> Tensor:
    """silu(gate) * up, BF16 [S, C, F], of a slot's F rows of gate and then F of up; else as
    `masked_gemm_bf16`. Sums are fp32 until the product of both. The counts are added to rows_S,
    int64."""
    if w_S2FI.shape[1] % 2:
        raise ValueError(f"expected as many rows of gate as of up; got {w_S2FI.shape[1]} in all")
    tile = tile or tiles.tile_for(tiles.MASKED_GATED_BF16, expected_rows)
    return _launch(tile, x_SCI, w_S2FI, counts_S, w_S2FI.shape[1] // 2, True, rows_S)


def _launch(
    tile: tiles.MaskedTile,
    x_SCI: Tensor,
    w_SOI: Tensor,
    counts_S: Tensor,
    out_width: int,
    gated: bool,
    rows_S: Tensor | None,
) -> Tensor:
    _check(x_SCI, w_SOI, counts_S)
    slots, capacity, width = x_SCI.shape
    out_SCO = torch.empty((slots, capacity, out_width), dtype=torch.bfloat16, device=x_SCI.device)
    if out_SCO.numel() == 0:
        return out_SCO
    x_NI, more = x_SCI.view(slots * capacity, width), tile.more or tile.bm
    masked_bf16_kernel[(triton.cdiv(out_width, tile.bo), slots)](
        TensorDescriptor.from_tensor(x_NI, [tile.bm, tile.bk]),
        TensorDescriptor.from_tensor(x_NI, [more, tile.bk]),
        TensorDescriptor.from_tensor(w_SOI.flatten(0, 1), [tile.bo, tile.bk]),
        out_SCO, counts_S, rows_S, capacity, out_width,
        width=width, GATED=gated, BM=tile.bm, MORE=tile.more, BO=tile.bo, BK=tile.bk,
        STAGES=tile.stages, MORE_STAGES=tile.more_stages, num_warps=tile.warps,
    )  # fmt: skip
    return out_SCO


def _check(x_SCI: Tensor, w_SOI: Tensor, counts_S: Tensor) -> None:
    if x_SCI.dtype != torch.bfloat16 or w_SOI.dtype != torch.bfloat16:
        raise ValueError(f"expected BF16 rows and weights; got {x_SCI.dtype} and {w_SOI.dtype}")
    check_shapes(x_SCI, w_SOI, 64)
    check_counts(len(x_SCI), w_SOI, counts_S)
