# mypy: disable-error-code="no-untyped-def"
"""Attention of invariant mode on GPUs: one path for prefill and decode over the paged cache, each
row a query of its own (FlashAttention, arXiv 2205.14135, section 3.1).

Key blocks lie at fixed positions of the sequence and are met in order, and a tile has the same
shape whatever runs, so neither chunks, nor other rows, nor the page size change a bit: a block that
a row cannot see leaves its sums exactly as they were. In 16 bits a program takes a tile of rows of
one sequence, tokens by the heads that share their keys. In float32 it takes one head of one token:
the tensor cores round float32, and products without them do not hold such tiles.

MLA is absorbed: queries [L + R] over rows of the latent cache, whose first L columns are the values
as well. `layers.attention.blockwise` is the torch form. Letters beyond the shape legend: h query
heads, g kv heads, L latent width, R rotated width, V width of a value, W tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.attention_split import (
    LIFT,
    LOG2_E,
    as_operand,
    paged_slots,
    query_operand,
    value_units,
    weights_operand,
)
from crossdock.kernels.linear_invariant import aligned
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

TILE_ROWS = 64
"""Rows of a program in 16 bits, tokens by heads."""


@triton.jit
def _tile_step(
    acc, best, total, n, end, q, q_rope, pos_q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    scale, window, dtype: tl.constexpr, STRIDE: tl.constexpr, STRIDE_SCALE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    pos = n + tl.arange(0, BLOCK_N)
    slot = paged_slots(table_ptr, pos, end, PAGE)
    there = pos < end
    d = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (d < D)[None, :]
    k_ND = as_operand(tl.load(k_ptr + slot[:, None] * STRIDE + d[None, :], mask=inside, other=0.0),
                      dtype)  # fmt: skip
    scores = tl.dot(q, tl.trans(k_ND), input_precision="ieee")
    if SCALED:
        k_scale = tl.load(k_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
        scores *= k_scale[None, :]
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        at = k_ptr + slot[:, None] * STRIDE + D + r[None, :]
        k_NR = as_operand(tl.load(at, mask=there[:, None] & (r < R)[None, :], other=0.0), dtype)
        turned = tl.dot(q_rope, tl.trans(k_NR), input_precision="ieee")
        if SCALED:
            rope_scale = tl.load(v_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
            turned *= rope_scale[None, :]
        scores += turned
    scores *= scale
    if SCALED:
        value_scale = k_scale
        if R == 0:
            value_scale = tl.load(v_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
        unit, inverse, rest = value_units(value_scale)
        scores += unit[None, :]
    visible = pos[None, :] <= pos_q[:, None]
    if WINDOW:
        visible = visible & (pos[None, :] > pos_q[:, None] - window)
    scores = tl.where(visible, scores, -1e30)
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # A row may have met no key of its window yet: then all its weights would be 1.
    lifted: tl.constexpr = LIFT if SCALED else 0.0
    p_MN = tl.where(visible, tl.exp2(scores - (higher - lifted)[:, None]), 0.0)
    shrink = tl.exp2(best - higher)
    if SCALED:
        total = total * shrink + tl.sum(p_MN * inverse[None, :], axis=1)
        p_MN *= rest[None, :]
    else:
        total = total * shrink + tl.sum(p_MN, axis=1)
    if R > 0:
        v_ND = k_ND
    else:
        at = v_ptr + slot[:, None] * STRIDE + d[None, :]
        v_ND = as_operand(tl.load(at, mask=inside, other=0.0), dtype)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights_operand(p_MN, dtype), v_ND, acc, input_precision="ieee")
    return acc, higher, total


# Batches differ in these, and kernels are not compiled for each of them.
_ANY = ["window", "stride_table"]
_ANY_ALIGNMENT = ["tiles_ptr", "positions_ptr", "table_ptr"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _tile_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, tiles_ptr, positions_ptr, table_ptr,
    scale, window, stride_table, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
    STRIDE: tl.constexpr, STRIDE_SCALE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (w, j): tile w, heads j of BLOCK_H, those of one group."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    w = tl.program_id(0)
    g = tl.program_id(1) // BLOCKS
    b = tl.load(tiles_ptr + 3 * w).to(tl.int64)
    first = tl.load(tiles_ptr + 3 * w + 1).to(tl.int64)
    tokens = tl.load(tiles_ptr + 3 * w + 2)
    row = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % BLOCKS * BLOCK_H + row % BLOCK_H
    valid = (row // BLOCK_H < tokens) & (in_group < GROUP)
    token = first + row // BLOCK_H
    # Rows of nobody see what the first one sees.
    pos_q = tl.load(positions_ptr + tl.where(valid, token, first)).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < D)[None, :]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float16 if SCALED and q_type == tl.bfloat16 else q_type
    out_row = token * HEADS + g * GROUP + in_group
    at = q_ptr + out_row[:, None] * (D + R) + d[None, :]
    q = query_operand(tl.load(at, mask=inside, other=0.0), dtype)
    q_rope = q
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        at = q_ptr + out_row[:, None] * (D + R) + D + r[None, :]
        mask = valid[:, None] & (r < R)[None, :]
        q_rope = query_operand(tl.load(at, mask=mask, other=0.0), dtype)
    k_at = k_ptr + g * D
    v_at = v_ptr + g * D
    table_at = table_ptr + b * stride_table
    end = tl.max(pos_q, axis=0) + 1
    start = 0
    if WINDOW:
        start = tl.maximum(tl.min(pos_q, axis=0) - window + 1, 0) // BLOCK_N * BLOCK_N
    best = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if INTERPRET:  # older interpreters have no range over a loaded number
        n = start
        while n < end:
            acc, best, total = _tile_step(
                acc, best, total, n, end, q, q_rope, pos_q, k_at, v_at, k_scale_ptr + g,
                v_scale_ptr + g, table_at, scale, window, dtype, STRIDE, STRIDE_SCALE, PAGE, D, R,
                BLOCK_D, BLOCK_R, BLOCK_N, WINDOW, SCALED,
            )  # fmt: skip
            n += BLOCK_N
    else:
        for n in range(start, end, BLOCK_N):
            acc, best, total = _tile_step(
                acc, best, total, n, end, q, q_rope, pos_q, k_at, v_at, k_scale_ptr + g,
                v_scale_ptr + g, table_at, scale, window, dtype, STRIDE, STRIDE_SCALE, PAGE, D, R,
                BLOCK_D, BLOCK_R, BLOCK_N, WINDOW, SCALED,
            )  # fmt: skip
    out = cast_rows(acc / total[:, None], out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + out_row[:, None] * D + d[None, :], out, mask=inside)


@triton.jit
def _row_step(
    acc, best, total, n, position, q, q_rope, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    scale, window, STRIDE: tl.constexpr, STRIDE_SCALE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    pos = n + tl.arange(0, BLOCK_N)
    there = pos <= position
    slot = paged_slots(table_ptr, pos, position + 1, PAGE)
    visible = there
    if WINDOW:
        visible = there & (pos > position - window)
    d = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (d < D)[None, :]
    at = k_ptr + slot[:, None] * STRIDE + d[None, :]
    k_ND = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scores = tl.sum(k_ND * q[None, :], axis=1)
    if SCALED:
        k_scale = tl.load(k_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
        scores *= k_scale
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        at = k_ptr + slot[:, None] * STRIDE + D + r[None, :]
        k_NR = tl.load(at, mask=there[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
        turned = tl.sum(k_NR * q_rope[None, :], axis=1)
        if SCALED:
            turned *= tl.load(v_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
        scores += turned
    scores = tl.where(visible, scores * scale, -1e30)
    higher = tl.maximum(best, tl.max(scores, axis=0))
    p_N = tl.where(visible, tl.exp2(scores - higher), 0.0)
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(p_N, axis=0)
    if R > 0:
        v_ND = k_ND
        if SCALED:
            p_N *= k_scale
    else:
        at = v_ptr + slot[:, None] * STRIDE + d[None, :]
        v_ND = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            p_N *= tl.load(v_scale_ptr + slot * STRIDE_SCALE, mask=there, other=0.0)
    acc = acc * shrink + tl.sum(p_N[:, None] * v_ND, axis=0)
    return acc, higher, total


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _row_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, tiles_ptr, positions_ptr, table_ptr,
    scale, window, stride_table, HEADS: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr,
    STRIDE_SCALE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Program (w, j): the only token of tile w, head j."""
    w = tl.program_id(0)
    head = tl.program_id(1)
    g = head // GROUP
    b = tl.load(tiles_ptr + 3 * w).to(tl.int64)
    token = tl.load(tiles_ptr + 3 * w + 1).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    at = q_ptr + (token * HEADS + head) * (D + R)
    q = tl.load(at + d, mask=d < D, other=0.0).to(tl.float32)
    q_rope = q
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        q_rope = tl.load(at + D + r, mask=r < R, other=0.0).to(tl.float32)
    k_at = k_ptr + g * D
    v_at = v_ptr + g * D
    table_at = table_ptr + b * stride_table
    n = 0
    if WINDOW:
        n = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    best = -1e30
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    while n <= position:
        acc, best, total = _row_step(
            acc, best, total, n, position, q, q_rope, k_at, v_at, k_scale_ptr + g, v_scale_ptr + g,
            table_at, scale, window, STRIDE, STRIDE_SCALE, PAGE, D, R, BLOCK_D, BLOCK_R, BLOCK_N,
            WINDOW, SCALED,
        )  # fmt: skip
        n += BLOCK_N
    out = cast_rows(acc / total, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + (token * HEADS + head) * D + d, out, mask=d < D)


def tile_tokens(group: int, dtype: torch.dtype) -> int:
    """Most tokens of a tile, where `group` heads share the keys."""
    return 1 if dtype == torch.float32 else TILE_ROWS // _heads(group)


def _heads(group: int) -> int:
    return min(TILE_ROWS, triton.next_power_of_2(group))


def attention_invariant(
    q_ThD: Tensor,
    cache: tuple[Tensor, ...],
    tiles_W3: Tensor,
    positions_T: Tensor,
    table_BP: Tensor,
    scale: float,
    page_size: int,
    latent: int | None = None,
    window: int | None = None,
) -> Tensor:
    """[T, h, D], or [T, h, L] weighted latents, in q's dtype.

    Args:
        q_ThD: queries, or with `latent` absorbed ones followed by turned ones, [T, h, L + R].
        cache: of one layer, as `cache.KVCache` has it, FP8 with its scales included; the keys of
            the queries themselves are there already.
        tiles_W3: int32 (sequence, first row, rows) that together are all rows; no tile has more
            rows than `tile_tokens`, or rows of two sequences.
        positions_T: int, of each row in its sequence. table_BP: int, pages of each sequence.
        latent: L, of MLA.
    """
    (T, h, width), k = q_ThD.shape, cache[0]
    fp8 = k.dtype == torch.float8_e4m3fn
    if latent is None:
        g, D, R, v = k.shape[1], width, 0, cache[1]
        k_scale, v_scale = cache[2:] if fp8 else (positions_T, positions_T)
    else:
        g, D, R, v = 1, latent, width - latent, k
        k_scale, v_scale = (cache[1], cache[1][:, 1:]) if fp8 else (positions_T, positions_T)
    out_ThD = q_ThD.new_empty(T, h, D)
    block_d = max(16, triton.next_power_of_2(D))
    shared = {
        "HEADS": h, "GROUP": h // g, "STRIDE": k.stride(0), "PAGE": page_size, "D": D, "R": R,
        "STRIDE_SCALE": k_scale.stride(0) if fp8 else 0, "BLOCK_D": block_d,
        "BLOCK_R": max(16, triton.next_power_of_2(R)), "WINDOW": window is not None, "SCALED": fp8,
    }  # fmt: skip
    tensors = aligned(q_ThD), k, v, k_scale, v_scale, out_ThD, tiles_W3, positions_T, table_BP
    rest = scale * LOG2_E, window or 0, table_BP.stride(0)
    if q_ThD.dtype == torch.float32:
        keys = 32 if block_d <= 128 else 16
        _row_kernel[(len(tiles_W3), h)](*tensors, *rest, **shared, BLOCK_N=keys, num_warps=4)
        return out_ThD
    block_h = _heads(h // g)
    _tile_kernel[(len(tiles_W3), g * triton.cdiv(h // g, block_h))](
        *tensors, *rest, **shared, BLOCK_H=block_h, BLOCK_M=TILE_ROWS,
        BLOCK_N=64 if block_d <= 128 else 32, num_warps=4 if block_d <= 128 else 8, num_stages=2,
    )  # fmt: skip
    return out_ThD
