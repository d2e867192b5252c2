# mypy: disable-error-code="no-untyped-def"
"""From projections to turned queries and cached keys and values, in one pass per layer.

Norms of queries and keys, rotary positions (arXiv 2104.09864; dimension i turns with i + R/2, the
tables' sines signed for that), and the write into the paged cache, E4M3 with a scale per row where
the cache is. A row whose slot is -1 is empty: nothing of it reaches the cache. Letters beyond the
shape legend: h query heads, g kv heads, L latent width, R rotated width.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rms_norm import normed
from crossdock.kernels.rounding import E4M3_MAX, cast_rows, quantise_blocks


@triton.jit
def _turned(
    x_ptr, norm_ptr, factor, x, head, i, cos, sin, mask, clip, HALF: tl.constexpr,
    D: tl.constexpr, HEAD_WIDTH: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """x turned; its partner dimensions are loaded again and normed with the same `factor`."""
    partner = tl.where(i < HALF, i + HALF, i - HALF)
    other = tl.load(x_ptr + head[:, None] * D + partner[None, :], mask=mask, other=0.0)
    other = other.to(tl.float32)
    if NORM:
        at = norm_ptr + head[:, None] * HEAD_WIDTH + partner[None, :]
        other = other * factor * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if CLIP:
        other = tl.minimum(tl.maximum(other, -clip), clip)
    return x * cos[None, :] + other * sin[None, :]


@triton.jit
def _heads(
    x_ptr, norm_ptr, cos, sin, eps, clip, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """fp32 [heads, D] of one token. NORM 1: over each head, 2: over all of them."""
    head = tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (i < D)[None, :]
    x = tl.load(x_ptr + head[:, None] * D + i[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    HEAD_WIDTH: tl.constexpr = D if NORM == 2 else 0
    if NORM:
        square = tl.sum(x * x, axis=1)
        if NORM == 1:
            factor = (1.0 / tl.sqrt(square / D + eps))[:, None]
        else:
            factor = 1.0 / tl.sqrt(tl.sum(square, axis=0) / (D * HEADS) + eps)
        at = norm_ptr + head[:, None] * HEAD_WIDTH + i[None, :]
        x = x * factor * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    if TURN:
        x = _turned(x_ptr, norm_ptr, factor, x, head, i, cos, sin, mask, clip, D // 2, D,
                    HEAD_WIDTH, NORM, CLIP)  # fmt: skip
    return x


@triton.jit
def _finite(x, dtype: tl.constexpr):
    """Values: what is not a number as 0, the rest within range of `dtype`. A tile may reach into
    another sequence's page, and what is masked there is multiplied by 0. Keys stay as they are:
    masked scores are replaced, the others tell their own sequence that it is broken."""
    most: tl.constexpr = 65504.0 if dtype == tl.float16 else 1e38
    return tl.where(x == x, tl.minimum(tl.maximum(x, -most), most), 0.0)


@triton.jit
def _quantised_keys(x):
    """As `quantise_blocks`; the scale of what is not finite is NaN, whatever becomes of codes."""
    values, scale = quantise_blocks(x, INTERPRET)
    return values, scale + tl.sum(x * 0.0, axis=1)


@triton.jit
def _write_heads(
    x, cache_ptr, scale_ptr, slot, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (i < D)[None, :]
    if not KEYS:
        x = _finite(x, cache_ptr.dtype.element_ty)
    if SCALED:
        if KEYS:
            values, scale = _quantised_keys(x)
        else:
            values, scale = quantise_blocks(x, INTERPRET)
        tl.store(scale_ptr + slot * HEADS + head, scale, mask=head < HEADS)
    else:
        values = cast_rows(x, cache_ptr.dtype.element_ty, INTERPRET)
    at = cache_ptr + slot * (HEADS * D) + head[:, None] * D + i[None, :]
    tl.store(at, values, mask=mask)


@triton.jit
def _gqa_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_out_ptr, k_ptr,
    v_ptr, k_scale_ptr, v_scale_ptr, eps, clip, stride_x, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_D)
    position = tl.load(positions_ptr + t).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cos = tl.load(cos_ptr + position * D + i, mask=i < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + i, mask=i < D, other=0.0).to(tl.float32)
    x_ptr = qkv_ptr + t * stride_x
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    q = _heads(x_ptr, q_norm_ptr, cos, sin, eps, clip, HEADS, BLOCK_HEADS, D, BLOCK_D, NORM, CLIP,
               True)  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)
    at = q_out_ptr + t * (HEADS * D) + head[:, None] * D + i[None, :]
    mask = (head < HEADS)[:, None] & (i < D)[None, :]
    tl.store(at, cast_rows(q, dtype, INTERPRET), mask=mask)
    if slot >= 0:
        x_ptr += HEADS * D
        k = _heads(x_ptr, k_norm_ptr, cos, sin, eps, clip, KV_HEADS, BLOCK_KV, D, BLOCK_D, NORM,
                   CLIP, True)  # fmt: skip
        _write_heads(k, k_ptr, k_scale_ptr, slot, KV_HEADS, BLOCK_KV, D, BLOCK_D, SCALED, True)
        x_ptr += KV_HEADS * D
        v = _heads(x_ptr, k_norm_ptr, cos, sin, eps, clip, KV_HEADS, BLOCK_KV, D, BLOCK_D, 0, CLIP,
                   False)  # fmt: skip
        _write_heads(v, v_ptr, v_scale_ptr, slot, KV_HEADS, BLOCK_KV, D, BLOCK_D, SCALED, False)


def gqa_norm_rope_write(
    qkv_TC: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    full_norm: bool,
    eps: float,
    clip: float | None,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache: tuple[Tensor, ...],
) -> Tensor:
    """Queries [T, h, D], normed, clipped and turned; keys (the same) and values (clipped) to
    `cache`.

    Args:
        qkv_TC: [T, (h + 2g) * D], rows may be strided.
        norms: weights of q and k, [D] each, or [h * D] and [g * D] with `full_norm`.
        slots_T: int, -1 for an empty row.
        cache: k, v [S, g, D] contiguous, and for E4M3 their scales fp32 [S, g].
    """
    k_SgD, v_SgD, *scales = cache
    T, (_, G, D) = qkv_TC.shape[0], k_SgD.shape
    h = qkv_TC.shape[1] // D - 2 * G
    q_ThD = qkv_TC.new_empty(T, h, D)
    if T == 0:
        return q_ThD
    q_norm, k_norm = norms or (cos_PD, cos_PD)
    k_scale, v_scale = scales or (cos_PD, cos_PD)
    block_h = triton.next_power_of_2(h)
    _gqa_kernel[(T,)](
        qkv_TC, q_norm, k_norm, cos_PD, sin_PD, positions_T, slots_T, q_ThD, k_SgD, v_SgD, k_scale,
        v_scale, eps, 0.0 if clip is None else clip, qkv_TC.stride(0), HEADS=h, BLOCK_HEADS=block_h,
        KV_HEADS=G, BLOCK_KV=triton.next_power_of_2(G), D=D, BLOCK_D=triton.next_power_of_2(D),
        NORM=0 if norms is None else 2 if full_norm else 1, CLIP=clip is not None,
        SCALED=bool(scales), num_warps=4 if block_h * D <= 4096 else 8,
    )  # fmt: skip
    return q_ThD


@triton.jit
def _mla_kernel(
    q_ptr, kv_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_out_ptr, cache_ptr,
    scale_ptr, eps, stride_qt, stride_qh, stride_kv, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, R: tl.constexpr,
    BLOCK_R: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    position = tl.load(positions_ptr + t).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cos = tl.load(cos_ptr + position * R + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * R + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
    partner = tl.where(r < R // 2, r + R // 2, r - R // 2)
    head = tl.arange(0, BLOCK_HEADS)
    mask = (head < HEADS)[:, None] & (r < R)[None, :]
    row = q_ptr + t * stride_qt + head[:, None] * stride_qh
    x = tl.load(row + r[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(row + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    out = cast_rows(x * cos + other * sin, q_out_ptr.dtype.element_ty, INTERPRET)
    tl.store(q_out_ptr + (t * HEADS + head[:, None]) * R + r[None, :], out, mask=mask)
    if slot >= 0:
        i = tl.arange(0, BLOCK_L)
        kv_ptr += t * stride_kv
        latent = tl.load(kv_ptr + i, mask=i < L, other=0.0).to(tl.float32)[None, :]
        weight = tl.load(norm_ptr + i, mask=i < L, other=0.0).to(tl.float32)
        latent = normed(latent, weight, eps, L)
        key = tl.load(kv_ptr + L + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
        turn = tl.load(kv_ptr + L + partner, mask=r < R, other=0.0).to(tl.float32)[None, :]
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        key = key * cos + turn * sin
        latent = _finite(latent, dtype)  # a value too
        at = cache_ptr + slot * (L + R)
        one = tl.arange(0, 1)
        if SCALED:
            latent_8, latent_scale = quantise_blocks(latent, INTERPRET)
            key_8, key_scale = _quantised_keys(key)
            tl.store(scale_ptr + slot * 2 + one, latent_scale)
            tl.store(scale_ptr + slot * 2 + 1 + one, key_scale)
            tl.store(at + i[None, :], latent_8, mask=(i < L)[None, :])
            tl.store(at + L + r[None, :], key_8, mask=(r < R)[None, :])
        else:
            tl.store(at + i[None, :], cast_rows(latent, dtype, INTERPRET), mask=(i < L)[None, :])
            tl.store(at + L + r[None, :], cast_rows(key, dtype, INTERPRET), mask=(r < R)[None, :])


def mla_norm_rope_write(
    q_ThR: Tensor,
    kv_TC: Tensor,
    norm_L: Tensor,
    eps: float,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache: tuple[Tensor, ...],
) -> Tensor:
    """Turned queries [T, h, R]; normed latents and turned keys to `cache`.

    Args:
        q_ThR: the part of the queries that turns; any strides, last dimension contiguous.
        kv_TC: [T, L + R] latent and key, rows may be strided.
        slots_T: int, -1 for an empty row.
        cache: [S, L + R] contiguous, and for E4M3 its scales fp32 [S, 2], of latent and key.
    """
    (T, h, R), L = q_ThR.shape, norm_L.shape[0]
    out_ThR = q_ThR.new_empty(T, h, R)
    if T == 0:
        return out_ThR
    scales = cache[1] if len(cache) > 1 else cos_PR
    _mla_kernel[(T,)](
        q_ThR, kv_TC, norm_L, cos_PR, sin_PR, positions_T, slots_T, out_ThR, cache[0], scales, eps,
        q_ThR.stride(0), q_ThR.stride(1), kv_TC.stride(0), HEADS=h,
        BLOCK_HEADS=triton.next_power_of_2(h), L=L, BLOCK_L=triton.next_power_of_2(L), R=R,
        BLOCK_R=triton.next_power_of_2(R), SCALED=len(cache) > 1, num_warps=4,
    )  # fmt: skip
    return out_ThR


def turn_twin(x_ThD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """fp32."""
    x = x_ThD.float()
    return x * cos_TD[:, None].float() + x.roll(x.shape[-1] // 2, -1) * sin_TD[:, None].float()


def _write_twin(cache: Tensor, scales: Tensor | None, slots_T: Tensor, x: Tensor) -> None:
    keep = slots_T >= 0
    slots, x = slots_T[keep], x[keep]
    if scales is not None:
        scale = x.abs().amax(-1).clamp_min(1e-10) / E4M3_MAX
        scales[slots] = scale
        x = x / scale[..., None]
    cache[slots] = x.to(cache.dtype)


def gqa_norm_rope_write_twin(
    qkv_TC: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    full_norm: bool,
    eps: float,
    clip: float | None,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache: tuple[Tensor, ...],
) -> Tensor:
    """fp32 until the end."""
    k_SgD, v_SgD, *scales = cache
    G, D = k_SgD.shape[1:]
    h = qkv_TC.shape[1] // D - 2 * G
    q, k, v = qkv_TC.float().split((h * D, G * D, G * D), dim=-1)
    if norms is not None:
        shape = (lambda x: x) if full_norm else (lambda x: x.unflatten(-1, (-1, D)))
        q, k = (
            F.rms_norm(shape(x), w.shape, w.float(), eps).flatten(1)
            for x, w in zip((q, k), norms, strict=True)
        )
    if clip is not None:
        q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
    cos, sin = cos_PD[positions_T], sin_PD[positions_T]
    q, k, v = (x.unflatten(-1, (-1, D)) for x in (q, k, v))
    q, k = (turn_twin(x, cos, sin) for x in (q, k))
    _write_twin(k_SgD, scales[0] if scales else None, slots_T, k)
    _write_twin(v_SgD, scales[1] if scales else None, slots_T, v)
    return q.to(qkv_TC.dtype)


def mla_norm_rope_write_twin(
    q_ThR: Tensor,
    kv_TC: Tensor,
    norm_L: Tensor,
    eps: float,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache: tuple[Tensor, ...],
) -> Tensor:
    """fp32 until the end."""
    L = norm_L.shape[0]
    cos, sin = cos_PR[positions_T], sin_PR[positions_T]
    latent = F.rms_norm(kv_TC[:, :L].float(), norm_L.shape, norm_L.float(), eps)
    key = turn_twin(kv_TC[:, None, L:], cos, sin)[:, 0]
    scales = cache[1] if len(cache) > 1 else None
    for part, x in ((slice(0, L), latent), (slice(L, None), key)):
        column = None if scales is None else scales[:, 0 if part.start == 0 else 1]
        _write_twin(cache[0][:, part], column, slots_T, x)
    return turn_twin(q_ThR, cos, sin).to(q_ThR.dtype)
