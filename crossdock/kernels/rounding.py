# mypy: disable-error-code="no-untyped-def"
"""Casts to narrow floats, round to nearest even everywhere.

Triton's interpreter truncates to BF16 and is off in E4M3, so there both go by integer bits.

Example, E4M3: one block of 128 channels with the largest magnitude 896 has scale 2; a value of 3
is kept as 1.5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = 448.0
BLOCK = 128
"""Channels that share one fp32 scale."""
_LEAST = 1e-10

_INV_MAX: tl.constexpr = tl.constexpr(1.0 / 448.0)


@triton.jit
def _e4m3_bits(x):
    """uint8 of the E4M3 nearest to x, |x| <= 448 or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    # The last place of 16384 in fp32 is 2^-9, the step of E4M3's subnormals.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(magnitude < 0.015625, small, normal)
    return (tl.where(x == x, tl.minimum(code, 0x7E), 0x7F) | sign).to(tl.uint8)


@triton.jit
def cast_rows(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 as `dtype`, rounded to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def quantise_blocks(x, INTERPRET: tl.constexpr):
    """fp32 [G, 128] as `(E4M3 [G, 128], fp32 scale [G])`; value = E4M3 * scale. NaN stays NaN: a
    row that is broken must not look as if it were none."""
    amax = tl.max(tl.abs(x), axis=1)
    amax = tl.where(amax > 1e-10, amax, 1e-10)  # also for a block of NaN alone
    scaled = x * tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)[:, None]
    scaled = tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRET:
        q = _e4m3_bits(scaled).to(tl.float8e4nv, bitcast=True)
    else:
        q = scaled.to(tl.float8e4nv)
    return q, amax * _INV_MAX


def quantise_blocks_torch(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Twin: `(float8_e4m3fn [T, H], fp32 scales [T, H / 128])`."""
    x = x_TH.float().unflatten(-1, (-1, BLOCK))
    amax = x.abs().fmax(torch.tensor(_LEAST)).amax(-1, keepdim=True)  # NaN is passed over
    scaled = (x * (torch.full_like(amax, E4M3_MAX) / amax)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), (amax * (1.0 / E4M3_MAX)).squeeze(-1)


def dequantise_blocks_torch(q_TH: Tensor, scales_TG: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = q_TH.float().unflatten(-1, (-1, BLOCK)) * scales_TG.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)
