# mypy: disable-error-code="no-untyped-def"
"""Portable Triton kernels behind `grouped_gemm_fp8`.

FP8 sums a block of 128 of the input width in the tensor core, then scales it and adds it to an
fp32 accumulator ("promotion"; DeepSeek-V3 report, section 3.3.2).
"""

import triton
import triton.language as tl

from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows


@triton.jit
def _tile(
    x,  # descriptor of [rows, I], or pointer when GATHER
    x_scale_ptr,
    w_desc,  # [S * O, I]
    w_scale_ptr,  # at the tile's slot and block of O
    first_row,
    rows_BM,  # int64 rows of x
    valid_BM,
    w_row,
    stride_scale_n,
    stride_scale_b,
    width: tl.constexpr,  # a trip count that the interpreter can take
    GATHER: tl.constexpr,
    SWAP: tl.constexpr,
    BM: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """fp32 [BM, BO]. SWAP computes its transpose: 64 or more weight rows fill the tensor core's
    M, which a handful of tokens could not."""
    acc = tl.zeros((BO, BM) if SWAP else (BM, BO), tl.float32)
    for block in range(width // BK):
        col = block * BK
        if GATHER:
            at = x + rows_BM[:, None] * width + (col + tl.arange(0, BK))[None, :]
            x_MK = tl.load(at, mask=valid_BM[:, None], other=0.0)
        else:
            x_MK = x.load([first_row, col])
        w_OK = w_desc.load([w_row, col])
        at_scale = x_scale_ptr + rows_BM * stride_scale_n + block * stride_scale_b
        scale = tl.load(at_scale, mask=valid_BM, other=0.0) * tl.load(w_scale_ptr + block)
        if SWAP:
            acc += tl.dot(w_OK, x_MK.T) * scale[None, :]
        else:
            acc += tl.dot(x_MK, w_OK.T) * scale[:, None]
    return tl.trans(acc) if SWAP else acc


@triton.jit
def grouped_kernel(
    x,
    x_scale_ptr,
    rows_ptr,
    w_desc,
    w_scale_ptr,
    out_ptr,
    offsets_ptr,
    tile_slots_ptr,
    slots,
    out_width,
    stride_scale_n,
    stride_scale_b,
    width: tl.constexpr,
    GATHER: tl.constexpr,
    BM: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Persistent; GROUP_M row tiles take turns before the next column, to share weights in L2."""
    tiles_m = tl.load(offsets_ptr + slots) // BM
    tiles_o = tl.cdiv(out_width, BO)
    per_group = GROUP_M * tiles_o
    tile = tl.program_id(0)
    while tile < tiles_m * tiles_o:
        first_m = tile // per_group * GROUP_M
        in_group = tile % per_group
        height = tl.minimum(tiles_m - first_m, GROUP_M)
        tile_m = first_m + in_group % height
        o = in_group // height * BO
        slot = tl.load(tile_slots_ptr + tile_m * BM // 128)
        out_rows = tile_m * BM + tl.arange(0, BM).to(tl.int64)
        rows = out_rows
        valid = out_rows >= 0
        if GATHER:
            rows = tl.load(rows_ptr + out_rows).to(tl.int64)
            valid = rows >= 0
        scale_block = slot.to(tl.int64) * tl.cdiv(out_width, 128) + o // 128
        scale_at = w_scale_ptr + scale_block * (width // 128)
        acc = _tile(
            x, x_scale_ptr, w_desc, scale_at, tile_m * BM, rows, valid, slot * out_width + o,
            stride_scale_n, stride_scale_b, width, GATHER, False, BM, BO, BK,
        )  # fmt: skip
        cols = o + tl.arange(0, BO)
        at = out_ptr + out_rows[:, None] * out_width + cols[None, :]
        tl.store(at, cast_rows(acc, tl.bfloat16, INTERPRET), mask=(cols < out_width)[None, :])
        tile += tl.num_programs(0)


@triton.jit
def _slot_rows(
    x_desc, x_scale_ptr, w_desc, scale_at, out_ptr, slot, o, count, capacity, out_width,
    stride_scale_n, stride_scale_b,
    width: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    cols = o + tl.arange(0, BO)
    start = 0
    while start < count:
        in_slot = start + tl.arange(0, BM)
        rows = slot.to(tl.int64) * capacity + in_slot
        valid = in_slot < count
        acc = _tile(
            x_desc, x_scale_ptr, w_desc, scale_at, slot * capacity + start, rows, valid,
            slot * out_width + o, stride_scale_n, stride_scale_b, width,
            False, SWAP, BM, BO, BK,
        )  # fmt: skip
        at = out_ptr + rows[:, None] * out_width + cols[None, :]
        value = cast_rows(acc, tl.bfloat16, INTERPRET)
        tl.store(at, value, mask=valid[:, None] & (cols < out_width)[None, :])
        start += BM


@triton.jit
def masked_kernel(
    x_desc, x_more_desc, x_scale_ptr, w_desc, w_scale_ptr, out_ptr, counts_ptr, capacity, out_width,
    stride_scale_n, stride_scale_b, width: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, MORE: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per (block of O, slot), down the slot's rows: none is launched for rows that
    a slot does not have, and the weights are read from memory once where BM covers the count. Slots
    with more rows take tiles of MORE rows (0: of BM as well)."""
    o = tl.program_id(0) * BO
    slot = tl.program_id(1)
    count = tl.load(counts_ptr + slot)
    scale_block = slot.to(tl.int64) * tl.cdiv(out_width, 128) + o // 128
    scale_at = w_scale_ptr + scale_block * (width // 128)
    if MORE and count > BM:
        _slot_rows(
            x_more_desc, x_scale_ptr, w_desc, scale_at, out_ptr, slot, o, count, capacity,
            out_width, stride_scale_n, stride_scale_b, width, False, MORE, BO, BK,
        )  # fmt: skip
    else:
        _slot_rows(
            x_desc, x_scale_ptr, w_desc, scale_at, out_ptr, slot, o, count, capacity,
            out_width, stride_scale_n, stride_scale_b, width, SWAP, BM, BO, BK,
        )  # fmt: skip
