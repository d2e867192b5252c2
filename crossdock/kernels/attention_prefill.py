# mypy: disable-error-code="no-untyped-def"
"""Causal attention of many sequences in one launch, each over all its keys, cached ones included
(FlashAttention-2, arXiv 2307.08691).

A program takes a tile of rows of one kv head: consecutive tokens, each with all heads that share
the keys. Keys come out of a paged cache, or lie one sequence after another: of GQA gathered from an
FP8 cache, of MLA expanded per head, with a rotated part that all heads share. Query i of a sequence
with n queries and m keys sees keys 0 .. m - n + i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.attention_split import (
    LOG2_E,
    KeyTile,
    Split,
    as_operand,
    gather_paged,
    paged_slots,
    weights_operand,
)
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

TILE_ROWS = 128
TILE, TILE_MLA = KeyTile(64, 8, 3), KeyTile(64, 8, 3)


@triton.jit
def _step(
    acc, best, total, n, end, q, q_rope, pos_q, k_ptr, v_ptr, k_rope_ptr, table_ptr, scale, window,
    dtype: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_R: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """PAGE 0: rows lie one after another. R 0: no rotated part apart from the others."""
    pos = n + tl.arange(0, BLOCK_N)
    slot = pos.to(tl.int64) if PAGE == 0 else paged_slots(table_ptr, pos, end, PAGE)
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    there = (pos < end)[:, None]
    if MASKED or D != BLOCK_D or V != BLOCK_V:
        at = k_ptr + slot[:, None] * STRIDE_K + d[None, :]
        k_ND = tl.load(at, mask=there & (d < D)[None, :], other=0.0)
        at = v_ptr + slot[:, None] * STRIDE_V + v[None, :]
        v_NV = tl.load(at, mask=there & (v < V)[None, :], other=0.0)
    else:
        k_ND = tl.load(k_ptr + slot[:, None] * STRIDE_K + d[None, :])
        v_NV = tl.load(v_ptr + slot[:, None] * STRIDE_V + v[None, :])
    k_DN = tl.trans(as_operand(k_ND, dtype))
    scores = tl.dot(q, k_DN, input_precision="ieee")
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        at = k_rope_ptr + slot[:, None] * STRIDE_R + r[None, :]
        k_NR = tl.load(at, mask=there & (r < R)[None, :], other=0.0)
        k_RN = tl.trans(as_operand(k_NR, dtype))
        scores = tl.dot(q_rope, k_RN, scores, input_precision="ieee")
    scores = scores * scale
    if MASKED:
        visible = pos[None, :] <= pos_q[:, None]
        if WINDOW:
            visible = visible & (pos[None, :] > pos_q[:, None] - window)
        scores = tl.where(visible, scores, -1e30)
    higher = tl.maximum(best, tl.max(scores, axis=1))
    p_MN = tl.exp2(scores - higher[:, None])
    if MASKED and WINDOW:
        # A row may have met no key of its window yet: then all its weights would be 1.
        p_MN = tl.where(visible, p_MN, 0.0)
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(p_MN, axis=1)
    acc = acc * shrink[:, None]
    v_NV = as_operand(v_NV, dtype)
    acc = tl.dot(weights_operand(p_MN, dtype), v_NV, acc, input_precision="ieee")
    return acc, higher, total


# Batches differ in these, and kernels are not compiled for each of them.
_ANY = ["sequences", "window", "stride_table"]
_ANY_ALIGNMENT = ["table_ptr", "lens_ptr", "cu_q_ptr", "cu_k_ptr"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _prefill_kernel(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, k_rope_ptr, out_ptr, table_ptr, cu_q_ptr, cu_k_ptr, lens_ptr,
    first_ptr, seq_ptr, sequences, scale, window, stride_qt, stride_qh, stride_rt, stride_rh,
    stride_ot, stride_oh, stride_table, STRIDE_K: tl.constexpr, STRIDE_KH: tl.constexpr,
    STRIDE_V: tl.constexpr, STRIDE_VH: tl.constexpr, STRIDE_R: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    g = tl.program_id(0)
    items = tl.load(first_ptr + sequences)
    # The last tiles of a sequence see most keys: they start first.
    w = items - 1 - tl.program_id(1)
    if w >= 0:
        b = tl.load(seq_ptr + w).to(tl.int64)
        tile = (w - tl.load(first_ptr + b)) * TOKENS
        first_row = tl.load(cu_q_ptr + b).to(tl.int32)
        queries = tl.load(cu_q_ptr + b + 1).to(tl.int32) - first_row
        length = tl.load(lens_ptr + b).to(tl.int32)
        row = tl.arange(0, BLOCK_M)
        token = tile + row // GROUP
        head = g * GROUP + row % GROUP
        valid = (row < TOKENS * GROUP) & (token < queries)
        token_row = (first_row + token).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        v = tl.arange(0, BLOCK_V)
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        at = q_ptr + (token_row * stride_qt + head * stride_qh)[:, None] + d[None, :]
        q = as_operand(tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0), dtype)
        q_rope = q
        if R > 0:
            r = tl.arange(0, BLOCK_R)
            at = q_rope_ptr + (token_row * stride_rt + head * stride_rh)[:, None] + r[None, :]
            mask = valid[:, None] & (r < R)[None, :]
            q_rope = as_operand(tl.load(at, mask=mask, other=0.0), dtype)
        pos_q = length - queries + token
        k_ptr += g * STRIDE_KH
        v_ptr += g * STRIDE_VH
        if PAGE == 0:
            base = tl.load(cu_k_ptr + b).to(tl.int64)
            k_ptr += base * STRIDE_K
            v_ptr += base * STRIDE_V
            k_rope_ptr += base * STRIDE_R
        else:
            table_ptr += b * stride_table
        first_pos = length - queries + tile
        end = tl.minimum(first_pos + TOKENS, length)
        start = 0
        full = (first_pos + 1) // BLOCK_N * BLOCK_N  # up to here all rows see all keys
        if WINDOW:
            start = tl.maximum(first_pos - window + 1, 0) // BLOCK_N * BLOCK_N
            full = start
        best = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        if INTERPRET:  # older interpreters have no range over a loaded number
            n = start
            while n < end:
                acc, best, total = _step(
                    acc, best, total, n, end, q, q_rope, pos_q, k_ptr, v_ptr, k_rope_ptr,
                    table_ptr, scale, window, dtype, STRIDE_K, STRIDE_V, STRIDE_R, PAGE, D, V, R,
                    BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_N, WINDOW, True,
                )  # fmt: skip
                n += BLOCK_N
        else:
            for n in range(start, full, BLOCK_N):
                acc, best, total = _step(
                    acc, best, total, n, end, q, q_rope, pos_q, k_ptr, v_ptr, k_rope_ptr,
                    table_ptr, scale, window, dtype, STRIDE_K, STRIDE_V, STRIDE_R, PAGE, D, V, R,
                    BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_N, False, False,
                )  # fmt: skip
            for n in range(full, end, BLOCK_N):
                acc, best, total = _step(
                    acc, best, total, n, end, q, q_rope, pos_q, k_ptr, v_ptr, k_rope_ptr,
                    table_ptr, scale, window, dtype, STRIDE_K, STRIDE_V, STRIDE_R, PAGE, D, V, R,
                    BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_N, WINDOW, True,
                )  # fmt: skip
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = out_ptr + (token_row * stride_ot + head * stride_oh)[:, None] + v[None, :]
        out = cast_rows(out, out_ptr.dtype.element_ty, INTERPRET)
        tl.store(at, out, mask=valid[:, None] & (v < V)[None, :])


def tile_tokens(group: int) -> int:
    """Tokens of a tile where `group` heads share the keys: the `tile` of `split_queries`."""
    return TILE_ROWS // group


def _launch(
    q: Tensor, q_rope: Tensor | None, k: Tensor, v: Tensor, k_rope: Tensor | None,
    table: Tensor | None, cu_q: Tensor, cu_k: Tensor, lens: Tensor, split: Split, scale: float,
    page_size: int, window: int | None, tile: KeyTile | None,
) -> Tensor:  # fmt: skip
    (T, h, D), G, V = q.shape, k.shape[1], v.shape[2]
    R = 0 if q_rope is None else q_rope.shape[2]
    out_ThV = q.new_empty(T, h, V)
    q_rope, k_rope = (q if q_rope is None else q_rope), (k if k_rope is None else k_rope)
    table = cu_k if table is None else table
    if tile is None and window is None and _fits_hopper(q, k, v, R, page_size):
        _launch_hopper(
            q, q_rope, k, v, k_rope, out_ThV, table, cu_q, cu_k, lens, split, scale, page_size, R
        )
        return out_ThV
    tile = tile or (TILE if R == 0 else TILE_MLA)
    _prefill_kernel[(G, split.items)](
        q, q_rope, k, v, k_rope, out_ThV, table, cu_q, cu_k, lens, split.first_B1, split.seq_W,
        cu_q.shape[0] - 1, scale * LOG2_E, window or 0,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), out_ThV.stride(0),
        out_ThV.stride(1), table.stride(0),
        STRIDE_K=k.stride(0), STRIDE_KH=k.stride(1), STRIDE_V=v.stride(0), STRIDE_VH=v.stride(1),
        STRIDE_R=k_rope.stride(0), PAGE=page_size, GROUP=h // G, D=D, V=V, R=R,
        BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_V=max(16, triton.next_power_of_2(V)),
        BLOCK_R=max(16, triton.next_power_of_2(R)), BLOCK_M=TILE_ROWS,
        BLOCK_N=tile.keys, WINDOW=window is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_ThV


def _fits_hopper(q: Tensor, k: Tensor, v: Tensor, R: int, page_size: int) -> bool:
    """Widths of the models served, and pages that bulk copies can take by 64 columns."""
    widths = k.shape[2] == v.shape[2] == 128 and R in (0, 64)
    pages = page_size % 64 == 0 or page_size in (16, 32)
    dtypes = q.dtype == k.dtype == v.dtype == torch.bfloat16
    if not (widths and pages and dtypes and q.is_cuda) or INTERPRET.value:
        return False
    return torch.cuda.get_device_capability(q.device)[0] == 9


def _launch_hopper(
    q: Tensor, q_rope: Tensor, k: Tensor, v: Tensor, k_rope: Tensor, out: Tensor, table: Tensor,
    cu_q: Tensor, cu_k: Tensor, lens: Tensor, split: Split, scale: float, page_size: int, R: int,
) -> None:  # fmt: skip
    # Imported here: Gluon is needed on Hopper only.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from crossdock.kernels.attention_prefill_hopper import hopper_kernel

    box = min(page_size or 64, 64)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def describe(x_NgD: Tensor) -> TensorDescriptor:
        N, G, D = x_NgD.shape
        shape, strides = [N, (G - 1) * x_NgD.stride(1) + D], [x_NgD.stride(0), 1]
        return TensorDescriptor(x_NgD, shape, strides, [box, 64], layout)

    G = k.shape[1]
    hopper_kernel[(G, split.items)](
        describe(k), describe(v), describe(k_rope[:, None] if R else k), q, q_rope, out, table,
        cu_q, cu_k, lens, split.first_B1, split.seq_W, cu_q.shape[0] - 1, scale * LOG2_E,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), out.stride(0),
        out.stride(1), table.stride(0), k.stride(1), v.stride(1),
        D=k.shape[2], V=v.shape[2], R=R, GROUP=q.shape[1] // G, PAGE=page_size, BOX=box, STAGES=2,
        num_warps=4,
    )  # fmt: skip


def prefill_gqa(
    q_ThD: Tensor,
    k_SgD: Tensor,
    v_SgD: Tensor,
    table_BP: Tensor,
    cu_q_B1: Tensor,
    lens_B: Tensor,
    split: Split,
    scale: float,
    page_size: int,
    window: int | None = None,
    tile: KeyTile | None = None,
) -> Tensor:
    """[T, h, D] in q's dtype. The keys of the queries themselves are in the cache already.

    Args:
        q_ThD: the queries of B sequences, one sequence after another; any strides, last dimension
            contiguous. h a multiple of the kv heads g.
        cu_q_B1: int, rows where sequences start, and T. lens_B: int, keys of each sequence.
        split: `split_queries(cu_q_B1, T, tile_tokens(h // g))`.
        Others: as `decode_gqa`.
    """
    return _launch(
        q_ThD, None, k_SgD, v_SgD, None, table_BP, cu_q_B1, cu_q_B1, lens_B, split, scale,
        page_size, window, tile,
    )  # fmt: skip


def prefill_gathered(
    q_ThD: Tensor,
    k_NgD: Tensor,
    v_NgD: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    lens_B: Tensor,
    split: Split,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """As `prefill_gqa`, over keys and values that lie one sequence after another, as
    `attention_gather.gather_keys` has them; cu_k_B1: int, rows where sequences start."""
    return _launch(
        q_ThD, None, k_NgD, v_NgD, None, None, cu_q_B1, cu_k_B1, lens_B, split, scale, 0, window,
        None,
    )  # fmt: skip


def prefill_mla(
    q_ThD: Tensor,
    q_rope_ThR: Tensor,
    k_NhD: Tensor,
    v_NhV: Tensor,
    k_rope_NR: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    lens_B: Tensor,
    split: Split,
    scale: float,
    tile: KeyTile | None = None,
) -> Tensor:
    """[T, h, V]. Keys and values are expanded, N of all sequences one after another.

    Args:
        q_ThD, q_rope_ThR, k_NhD, v_NhV, k_rope_NR: any strides, last dimension contiguous.
        cu_q_B1, cu_k_B1: int, rows where sequences start; lens_B: int, keys of each.
        split: `split_queries(cu_q_B1, T, tile_tokens(1))`.
    """
    return _launch(
        q_ThD, q_rope_ThR, k_NhD, v_NhV, k_rope_NR, None, cu_q_B1, cu_k_B1, lens_B, split, scale,
        0, None, tile,
    )  # fmt: skip


def causal_twin(
    q_ThD: Tensor, k_NgD: Tensor, v_NgV: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """fp32 [T, h, V] of one sequence: the last T of its N tokens ask."""
    (T, h, _), (N, G, _) = q_ThD.shape, k_NgD.shape
    q_TgMD = q_ThD.float().unflatten(1, (G, h // G))
    scores = torch.einsum("tgmd,ngd->gmtn", q_TgMD, k_NgD.float()) * scale
    i = torch.arange(N, device=q_ThD.device)
    pos = i[N - T :, None]
    hidden = i > pos if window is None else (i > pos) | (i <= pos - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("gmtn,ngv->tgmv", weights, v_NgV.float()).flatten(1, 2)


def prefill_gqa_twin(
    q_ThD: Tensor,
    k_SgD: Tensor,
    v_SgD: Tensor,
    table_BP: Tensor,
    cu_q_B1: Tensor,
    lens_B: Tensor,
    scale: float,
    page_size: int,
    window: int | None = None,
) -> Tensor:
    """fp32 [T, h, D]. Synchronises."""
    out, cu = [], cu_q_B1.tolist()
    for b, length in enumerate(lens_B.tolist()):
        k, v = (gather_paged(t, table_BP[b], length, page_size) for t in (k_SgD, v_SgD))
        out.append(causal_twin(q_ThD[cu[b] : cu[b + 1]], k, v, scale, window))
    return torch.cat(out)
