# mypy: disable-error-code="no-untyped-def"
"""Decoding with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed.

All heads read one latent row per token, as key (with its rotated part) and, its first L columns,
as value. With few heads that is bound by reading the cache, and products are transposed as in
`attention_gqa`; from 64 heads on it is bound by arithmetic, a program takes 64 heads, and queries
are the left operand. Letters beyond the shape legend: L latent width, R rotated width.
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

TILE, TILE_FP8, TILE_WIDE = KeyTile(32, 4, 3), KeyTile(32, 8, 2), KeyTile(64, 8, 2)
WIDE_HEADS = 64
"""Heads of a program where arithmetic is the bound."""


@triton.jit
def _step(
    acc, best, total, slot, n, end, q, q_rope, cache_ptr, scale_ptr, table_ptr, scale,
    dtype: tl.constexpr, PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    pos = n + tl.arange(0, BLOCK_N)
    following = paged_slots(table_ptr, pos + BLOCK_N, end, PAGE)  # known before it is needed
    i = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    row_ptr = cache_ptr + slot[:, None] * (L + R)
    # Rows past the end are read, from page 0: they are finite, and masked below.
    if L == BLOCK_L and R == BLOCK_R:
        kv_NL = tl.load(row_ptr + i[None, :])
        k_NR = tl.load(row_ptr + L + r[None, :])
    else:
        kv_NL = tl.load(row_ptr + i[None, :], mask=(i < L)[None, :], other=0.0)
        k_NR = tl.load(row_ptr + L + r[None, :], mask=(r < R)[None, :], other=0.0)
    kv_NL = as_operand(kv_NL, dtype)
    k_NR = as_operand(k_NR, dtype)
    AXIS: tl.constexpr = 1 if WIDE else 0  # the one of the keys
    visible = pos < end
    scores = (
        tl.dot(q, tl.trans(kv_NL), input_precision="ieee")
        if WIDE
        else tl.dot(kv_NL, q, input_precision="ieee")
    )
    if SCALED:
        latent_scale = tl.load(scale_ptr + slot * 2, mask=visible, other=1.0)
        rope_scale = tl.load(scale_ptr + slot * 2 + 1, mask=visible, other=1.0)
        # 0 in slots that nobody has written, NaN in those of broken keys.
        rope_scale = tl.maximum(rope_scale, 1e-20, propagate_nan=tl.PropagateNan.ALL)
        unit, inverse, rest = value_units(latent_scale)
        # In units of the rotated part's scale both parts can be summed in the tensor core.
        scores *= tl.expand_dims(latent_scale / rope_scale, 1 - AXIS)
    if WIDE:
        scores = tl.dot(q_rope, tl.trans(k_NR), scores, input_precision="ieee")
    else:
        scores = tl.dot(k_NR, q_rope, scores, input_precision="ieee")
    scores = scores * scale
    if SCALED:
        scores *= tl.expand_dims(rope_scale, 1 - AXIS)
        scores += tl.expand_dims(unit, 1 - AXIS)
    scores = tl.where(tl.expand_dims(visible, 1 - AXIS), scores, -1e30)
    higher = tl.maximum(best, tl.max(scores, axis=AXIS))
    shrink = tl.exp2(best - higher)
    if SCALED:
        p = tl.exp2(scores - tl.expand_dims(higher - LIFT, AXIS))
        part = tl.sum(p * tl.expand_dims(inverse, 1 - AXIS), axis=AXIS)
        p *= tl.expand_dims(rest, 1 - AXIS)
    else:
        p = tl.exp2(scores - tl.expand_dims(higher, AXIS))
        part = tl.sum(p, axis=AXIS)
    total = total * shrink + part
    acc = acc * tl.expand_dims(shrink, AXIS)
    p = weights_operand(p, dtype)
    if WIDE:
        acc = tl.dot(p, kv_NL, acc, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(kv_NL), p, acc, input_precision="ieee")
    return acc, higher, total, following


# Batches differ in these, and kernels are not compiled for each of them.
_ANY = ["sequences", "stride_table"]
_ANY_ALIGNMENT = ["table_ptr", "lens_ptr"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _decode_kernel(
    q_ptr, q_rope_ptr, cache_ptr, scale_ptr, table_ptr, lens_ptr, first_ptr, seq_ptr, chunk_ptr,
    part_ptr, lse_ptr, sequences, scale, heads, stride_qb, stride_qh, stride_rb, stride_rh,
    stride_table, PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(1)
    if w < tl.load(first_ptr + sequences):
        b = tl.load(seq_ptr + w).to(tl.int64)
        length = tl.load(lens_ptr + b).to(tl.int32)
        chunk = tl.load(chunk_ptr)
        start = (w - tl.load(first_ptr + b)) * chunk
        end = tl.minimum(start + chunk, length)
        h = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        i = tl.arange(0, BLOCK_L)
        r = tl.arange(0, BLOCK_R)
        q_type: tl.constexpr = q_ptr.dtype.element_ty
        dtype: tl.constexpr = tl.float16 if SCALED and q_type == tl.bfloat16 else q_type
        H_AXIS: tl.constexpr = 1 if WIDE else 0  # to expand heads along
        X_AXIS: tl.constexpr = 0 if WIDE else 1
        h_2 = tl.expand_dims(h, H_AXIS)
        i_2 = tl.expand_dims(i, X_AXIS)
        r_2 = tl.expand_dims(r, X_AXIS)
        at = q_ptr + b * stride_qb + h_2 * stride_qh + i_2
        q = query_operand(tl.load(at, mask=(h_2 < heads) & (i_2 < L), other=0.0), dtype)
        at = q_rope_ptr + b * stride_rb + h_2 * stride_rh + r_2
        q_rope = query_operand(tl.load(at, mask=(h_2 < heads) & (r_2 < R), other=0.0), dtype)
        table_ptr += b * stride_table
        best = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_L) if WIDE else (BLOCK_L, BLOCK_M), tl.float32)
        slot = paged_slots(table_ptr, start + tl.arange(0, BLOCK_N), end, PAGE)
        if INTERPRET:  # older interpreters have no range over a loaded number
            n = start
            while n < end:
                acc, best, total, slot = _step(
                    acc, best, total, slot, n, end, q, q_rope, cache_ptr, scale_ptr, table_ptr,
                    scale, dtype, PAGE, L, R, BLOCK_L, BLOCK_R, BLOCK_N, SCALED, WIDE,
                )  # fmt: skip
                n += BLOCK_N
        else:
            for n in range(start, end, BLOCK_N):
                acc, best, total, slot = _step(
                    acc, best, total, slot, n, end, q, q_rope, cache_ptr, scale_ptr, table_ptr,
                    scale, dtype, PAGE, L, R, BLOCK_L, BLOCK_R, BLOCK_N, SCALED, WIDE,
                )  # fmt: skip
        out_row = w.to(tl.int64) * heads + h
        at = part_ptr + tl.expand_dims(out_row, H_AXIS) * L + i_2
        acc = acc / tl.expand_dims(total, H_AXIS)
        tl.store(at, acc, mask=(h_2 < heads) & (i_2 < L))
        lifted: tl.constexpr = LIFT if SCALED else 0.0
        tl.store(lse_ptr + out_row, best - lifted + tl.log2(total), mask=h < heads)


def decode_slots(heads: int, device: torch.device) -> int:
    """How many items run at once, for `split_keys`."""
    if device.type != "cuda":
        return 2
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, cores // triton.cdiv(heads, WIDE_HEADS))


def decode_mla(
    q_BhL: Tensor,
    q_rope_BhR: Tensor,
    cache_SC: Tensor,
    table_BP: Tensor,
    lens_B: Tensor,
    split: Split,
    scale: float,
    page_size: int,
    scales: Tensor | None = None,
    tile: KeyTile | None = None,
) -> Tensor:
    """Weighted latents [B, h, L] in q's dtype; zeros where `lens_B` is 0.

    Args:
        q_BhL: absorbed queries, q_rope_BhR turned ones; any strides, last dimension contiguous.
        cache_SC: [slots, L + R] contiguous; slot `page * page_size + offset`. All rows finite.
        table_BP: int, pages of each sequence. lens_B: int, keys of each, this token's included.
        split: `split_keys(lens_B, ...)`.
        scales: of an E4M3 cache, fp32 [slots, 2] for latent and rotated key.
    """
    (B, h, L), R = q_BhL.shape, q_rope_BhR.shape[2]
    part_WhL = torch.empty(split.items, h, L, dtype=torch.float32, device=q_BhL.device)
    lse_Wh = torch.empty(split.items, h, dtype=torch.float32, device=q_BhL.device)
    block_m = min(WIDE_HEADS, max(16, triton.next_power_of_2(h)))
    grid = (triton.cdiv(h, block_m), split.items)
    if tile is None and _fits_hopper(q_BhL, L, R, page_size):
        _launch_hopper(
            grid, q_BhL, q_rope_BhR, cache_SC, scales, table_BP, lens_B, split, part_WhL, lse_Wh,
            scale, page_size, block_m,
        )  # fmt: skip
        return merge(part_WhL, lse_Wh, split, q_BhL.new_empty(B, h, L))
    wide = block_m == WIDE_HEADS
    if tile is None:
        tile = TILE_WIDE if wide else TILE if scales is None else TILE_FP8
    _decode_kernel[grid](
        q_BhL, q_rope_BhR, cache_SC, cache_SC if scales is None else scales, table_BP, lens_B,
        split.first_B1, split.seq_W, split.chunk, part_WhL, lse_Wh, B, scale * LOG2_E, h,
        q_BhL.stride(0), q_BhL.stride(1), q_rope_BhR.stride(0), q_rope_BhR.stride(1),
        table_BP.stride(0),
        PAGE=page_size, L=L, R=R, BLOCK_L=max(16, triton.next_power_of_2(L)),
        BLOCK_R=max(16, triton.next_power_of_2(R)), BLOCK_M=block_m, BLOCK_N=tile.keys,
        SCALED=scales is not None, WIDE=wide, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return merge(part_WhL, lse_Wh, split, q_BhL.new_empty(B, h, L))


def _fits_hopper(q_BhL: Tensor, L: int, R: int, page_size: int) -> bool:
    """DeepSeek's widths, and pages that bulk copies can take in blocks of rows by 64 columns."""
    fits = (L, R) == (512, 64) and q_BhL.dtype == torch.bfloat16
    pages = page_size % 64 == 0 or page_size in (16, 32)
    if not (fits and pages and q_BhL.is_cuda) or INTERPRET.value:
        return False
    return torch.cuda.get_device_capability(q_BhL.device)[0] == 9


def _launch_hopper(
    grid: tuple[int, int], q_BhL: Tensor, q_rope_BhR: Tensor, cache_SC: Tensor,
    scales: Tensor | None, table_BP: Tensor, lens_B: Tensor, split: Split, part_WhL: Tensor,
    lse_Wh: Tensor, scale: float, page_size: int, heads: int,
) -> None:  # fmt: skip
    # Imported here: Gluon is needed on Hopper only.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from crossdock.kernels.attention_mla_hopper import hopper_kernel

    box = min(page_size, 64)
    if scales is None:
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        cache = TensorDescriptor.from_tensor(cache_SC, [box, 64], layout)
    else:
        cache = cache_SC.view(torch.int32)
    hopper_kernel[grid](
        cache, lse_Wh if scales is None else scales, q_BhL, q_rope_BhR, table_BP, lens_B,
        split.first_B1, split.seq_W, split.chunk, part_WhL, lse_Wh, q_BhL.shape[0],
        scale * LOG2_E, q_BhL.shape[1], q_BhL.stride(0), q_BhL.stride(1), q_rope_BhR.stride(0),
        q_rope_BhR.stride(1), table_BP.stride(0),
        M=heads, L=q_BhL.shape[2], PAGE=page_size, BOX=box, STAGES=2, SCALED=scales is not None,
        num_warps=4,
    )  # fmt: skip


def decode_mla_twin(
    q_BhL: Tensor,
    q_rope_BhR: Tensor,
    cache_SC: Tensor,
    table_BP: Tensor,
    lens_B: Tensor,
    scale: float,
    page_size: int,
    scales: Tensor | None = None,
) -> Tensor:
    """fp32 [B, h, L]. Synchronises."""
    L = q_BhL.shape[2]
    q_BhC = torch.cat((q_BhL, q_rope_BhR), dim=-1).float()
    out_BhL = torch.zeros(q_BhL.shape, device=q_BhL.device)
    for b, length in enumerate(lens_B.tolist()):
        if length == 0:
            continue
        rows_NC = gather_paged(cache_SC, table_BP[b], length, page_size).float()
        if scales is not None:
            factors = gather_paged(scales, table_BP[b], length, page_size)
            parts = rows_NC.split((L, rows_NC.shape[1] - L), dim=1)
            rows_NC = torch.cat(
                [x * f[:, None] for x, f in zip(parts, factors.T, strict=True)], dim=1
            )
        weights_hN = (q_BhC[b] @ rows_NC.T).mul_(scale).softmax(-1)
        out_BhL[b] = weights_hN @ rows_NC[:, :L]
    return out_BhL
