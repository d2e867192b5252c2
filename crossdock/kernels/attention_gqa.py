# mypy: disable-error-code="no-untyped-def"
"""Decoding with grouped-query attention over a paged cache: one query row per sequence.

A program takes one item (see `attention_split`) and one kv head. It is bound by reading keys and
values, and the heads of a group are too few to fill the tensor core's M; so products are computed
transposed, with keys and values as the left operand, straight out of shared memory. Those of an
E4M3 cache pass through registers in any case: there queries are the left operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.attention_split import (
    LIFT,
    LOG2_E,
    KeyTile,
    Split,
    as_operand,
    gather_paged,
    merge,
    paged_slots,
    query_operand,
    value_units,
    weights_operand,
)
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

TILE, TILE_FP8 = KeyTile(64, 4, 3), KeyTile(128, 4, 3)


@triton.jit
def _step(
    acc, best, total, slot, n, end, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, scale,
    dtype: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_SCALE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    pos = n + tl.arange(0, BLOCK_N)
    following = paged_slots(table_ptr, pos + BLOCK_N, end, PAGE)  # known before it is needed
    d = tl.arange(0, BLOCK_D)
    # Rows past the end are read, from page 0: they are finite, and masked below.
    if D == BLOCK_D:
        k_ND = tl.load(k_ptr + slot[:, None] * STRIDE_K + d[None, :])
        v_ND = tl.load(v_ptr + slot[:, None] * STRIDE_V + d[None, :])
    else:
        k_ND = tl.load(
            k_ptr + slot[:, None] * STRIDE_K + d[None, :], mask=(d < D)[None, :], other=0
        )
        v_ND = tl.load(
            v_ptr + slot[:, None] * STRIDE_V + d[None, :], mask=(d < D)[None, :], other=0
        )
    k_ND = as_operand(k_ND, dtype)
    v_ND = as_operand(v_ND, dtype)
    AXIS: tl.constexpr = 1 if SCALED else 0  # the one of the keys
    if SCALED:
        unit, inverse, rest = value_units(tl.load(v_scale_ptr + slot * STRIDE_SCALE))
        scores = tl.dot(q, tl.trans(k_ND), input_precision="ieee") * scale
        scores *= tl.load(k_scale_ptr + slot * STRIDE_SCALE)[None, :]
        scores += unit[None, :]
    else:
        scores = tl.dot(k_ND, q, input_precision="ieee") * scale
    scores = tl.where(tl.expand_dims(pos < end, 1 - AXIS), scores, -1e30)
    higher = tl.maximum(best, tl.max(scores, axis=AXIS))
    shrink = tl.exp2(best - higher)
    acc = acc * tl.expand_dims(shrink, AXIS)
    if SCALED:
        p = tl.exp2(scores - (higher - LIFT)[:, None])
        total = total * shrink + tl.sum(p * inverse[None, :], axis=1)
        p *= rest[None, :]
        acc = tl.dot(weights_operand(p, dtype), v_ND, acc, input_precision="ieee")
    else:
        p = tl.exp2(scores - higher[None, :])
        total = total * shrink + tl.sum(p, axis=0)
        acc = tl.dot(tl.trans(v_ND), weights_operand(p, dtype), acc, input_precision="ieee")
    return acc, higher, total, following


# Batches differ in these, and kernels are not compiled for each of them.
_ANY = ["sequences", "window", "stride_table"]
_ANY_ALIGNMENT = ["table_ptr", "lens_ptr"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lens_ptr, first_ptr, seq_ptr,
    chunk_ptr, part_ptr, lse_ptr, out_ptr, sequences, scale, window, stride_qb, stride_qh,
    stride_table, heads, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_SCALE: tl.constexpr,
    STRIDE_SCALE_G: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    g, w = tl.program_id(0), tl.program_id(1)
    if w < tl.load(first_ptr + sequences):
        b = tl.load(seq_ptr + w).to(tl.int64)
        length = tl.load(lens_ptr + b).to(tl.int32)
        chunk = tl.load(chunk_ptr)
        start = (w - tl.load(first_ptr + b)) * chunk
        if WINDOW:
            start += tl.maximum(length - window, 0)
        end = tl.minimum(start + chunk, length)
        row = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        M_AXIS: tl.constexpr = 1 if SCALED else 0  # to expand heads along
        row_2 = tl.expand_dims(row, M_AXIS)
        d_2 = tl.expand_dims(d, 1 - M_AXIS)
        inside = (row_2 < GROUP) & (d_2 < D)
        at = q_ptr + b * stride_qb + (g * GROUP + row_2) * stride_qh + d_2
        q = tl.load(at, mask=inside, other=0.0)
        q_type: tl.constexpr = q_ptr.dtype.element_ty
        dtype: tl.constexpr = tl.float16 if SCALED and q_type == tl.bfloat16 else q_type
        q = query_operand(q, dtype)
        k_ptr += g * D
        v_ptr += g * D
        k_scale_ptr += g * STRIDE_SCALE_G
        v_scale_ptr += g * STRIDE_SCALE_G
        table_ptr += b * stride_table
        best = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D) if SCALED else (BLOCK_D, BLOCK_M), tl.float32)
        slot = paged_slots(table_ptr, start + tl.arange(0, BLOCK_N), end, PAGE)
        if INTERPRET:  # older interpreters have no range over a loaded number
            n = start
            while n < end:
                acc, best, total, slot = _step(
                    acc, best, total, slot, n, end, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    table_ptr, scale, dtype, STRIDE_K, STRIDE_V, STRIDE_SCALE, PAGE, D, BLOCK_D,
                    BLOCK_N, SCALED,
                )  # fmt: skip
                n += BLOCK_N
        else:
            for n in range(start, end, BLOCK_N):
                acc, best, total, slot = _step(
                    acc, best, total, slot, n, end, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    table_ptr, scale, dtype, STRIDE_K, STRIDE_V, STRIDE_SCALE, PAGE, D, BLOCK_D,
                    BLOCK_N, SCALED,
                )  # fmt: skip
        out = acc / tl.expand_dims(total, M_AXIS)
        if tl.load(first_ptr + b + 1) - tl.load(first_ptr + b) == 1:  # nothing to merge
            whole_row = b * heads + g * GROUP + row
            whole = out_ptr + tl.expand_dims(whole_row, M_AXIS) * D + d_2
            tl.store(whole, cast_rows(out, q_type, INTERPRET), mask=inside)
        else:
            part_row = w.to(tl.int64) * heads + g * GROUP + row
            part = part_ptr + tl.expand_dims(part_row, M_AXIS) * D + d_2
            tl.store(part, out, mask=inside)
            lifted: tl.constexpr = LIFT if SCALED else 0.0
            tl.store(lse_ptr + part_row, best - lifted + tl.log2(total), mask=row < GROUP)


def decode_slots(kv_heads: int, device: torch.device) -> int:
    """How many items run at once, for `split_keys`."""
    if device.type != "cuda":
        return 2
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, 2 * cores // kv_heads)


def decode_gqa(
    q_BhD: Tensor,
    k_SgD: Tensor,
    v_SgD: Tensor,
    table_BP: Tensor,
    lens_B: Tensor,
    split: Split,
    scale: float,
    page_size: int,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    tile: KeyTile | None = None,
) -> Tensor:
    """[B, h, D] in q's dtype; zeros where `lens_B` is 0.

    Args:
        q_BhD: any strides, last dimension contiguous. h a multiple of the kv heads g.
        k_SgD, v_SgD: the cache, contiguous; slot `page * page_size + offset`. All rows finite.
        table_BP: int, pages of each sequence. lens_B: int, keys of each, this token's included.
        split: `split_keys(lens_B, ..., window)`.
        scales: of an E4M3 cache, fp32 [S, g] for keys and for values, equal strides (a single
            number is one expanded).
    """
    B, h, D = q_BhD.shape
    G = k_SgD.shape[1]
    tile = tile or (TILE if scales is None else TILE_FP8)
    k_scale, v_scale = scales or (q_BhD, q_BhD)
    stride = k_scale.stride() if scales else (0, 0)
    part_WhD = torch.empty(split.items, h, D, dtype=torch.float32, device=q_BhD.device)
    lse_Wh = torch.empty(split.items, h, dtype=torch.float32, device=q_BhD.device)
    out_BhD = q_BhD.new_empty(B, h, D)
    _decode_kernel[(G, split.items)](
        q_BhD, k_SgD, v_SgD, k_scale, v_scale, table_BP, lens_B, split.first_B1, split.seq_W,
        split.chunk, part_WhD, lse_Wh, out_BhD, B, scale * LOG2_E, window or 0, q_BhD.stride(0),
        q_BhD.stride(1), table_BP.stride(0), h,
        STRIDE_K=k_SgD.stride(0), STRIDE_V=v_SgD.stride(0), STRIDE_SCALE=stride[0],
        STRIDE_SCALE_G=stride[1], PAGE=page_size, GROUP=h // G, D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_M=max(16, triton.next_power_of_2(h // G)), BLOCK_N=tile.keys,
        WINDOW=window is not None, SCALED=scales is not None, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return merge(part_WhD, lse_Wh, split, out_BhD, whole=True)


def decode_gqa_twin(
    q_BhD: Tensor,
    k_SgD: Tensor,
    v_SgD: Tensor,
    table_BP: Tensor,
    lens_B: Tensor,
    scale: float,
    page_size: int,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """fp32 [B, h, D]. Synchronises."""
    out_BhD = torch.zeros(q_BhD.shape, device=q_BhD.device)
    for b, length in enumerate(lens_B.tolist()):
        if length == 0:
            continue
        cache = (k_SgD, v_SgD) + (scales or ())
        k, v, *factors = (gather_paged(t, table_BP[b], length, page_size) for t in cache)
        k, v = k.float(), v.float()
        if factors:
            k, v = k * factors[0][..., None], v * factors[1][..., None]
        k, v = (t[-window:] if window else t for t in (k, v))
        q_gMD = q_BhD[b].float().unflatten(0, (k.shape[1], -1))
        weights = torch.einsum("gmd,ngd->gmn", q_gMD, k).mul_(scale).softmax(-1)
        out_BhD[b] = torch.einsum("gmn,ngd->gmd", weights, v).flatten(0, 1)
    return out_BhD
