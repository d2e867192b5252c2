"""Matrix products, in two sets chosen once at build: the fast ones and those of invariant mode.

In invariant mode a row's result must depend on nothing but the row and the weight. BLAS picks its
kernel by the number of rows, so on CPUs every call is made with the same number of them,
`ROW_TILE`; on GPUs there are kernels of our own, `kernels.linear_invariant`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.layers.fp8 import fp8_linear

MatMul = Callable[[Tensor, Any, Tensor | None], Tensor]
"""`(x_TK, w_NK, b_N or None) -> [T, N]`, as `F.linear`; `w_NK` a tensor, or what the model was
built with in its place: `pack`'s, or in FP8 a `Fp8Weight`."""
BatchMatMul = Callable[[Tensor, Tensor], Tensor]
"""`(x_GTK, w_GKN) -> [G, T, N]`: T tokens through G matrices."""
GatedUnit = Callable[[Tensor], Tensor]
"""SwiGLU's middle: `[T, 2F]`, gate first then up, to `silu(gate) * up` [T, F]."""

Logits = Callable[[Tensor, Any, Tensor | None], Tensor]
"""`(x_BH, head_VH, out_BV or None) -> [B, V]` in float32; `head_VH` as `MatMul`'s weight."""

ONEDNN_ROWS = 16
ROW_TILE = 16
# Sizes that are no multiple of the vector width take scalar tails, whose order of sums depends on
# the row's place in the tile (seen with MKL: K = 33, N = 3 in mm; N = 5 in bmm).
WIDTH_MULTIPLE = 16
PACK_ELEMENTS = 1 << 15
PACK_ROWS = 32
"""A hint; any from 8 to 1,024 gives the same speed at any number of rows."""


def linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    return F.linear(x_TK, w_NK, b_N)


def onednn_linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """As `linear`, for float32 on CPUs; `w_NK` may come from `onednn_pack`. torch gives these
    products to MKL, which reaches half of oneDNN's speed on AMD processors; where rows are few and
    the weight is not packed, oneDNN's own overhead weighs more."""
    rows = x_TK.shape[0]
    if rows < ONEDNN_ROWS and not w_NK.is_mkldnn:
        return F.linear(x_TK, w_NK, b_N)
    padded = padded_rows(rows)
    if padded > rows:
        x_TK = F.pad(x_TK, (0, 0, 0, padded - rows))
    return torch.ops.mkldnn._linear_pointwise(x_TK, w_NK, b_N, "none", [], "")[:rows]


def padded_rows(rows: int) -> int:
    """Few different numbers of rows: oneDNN compiles a kernel for each that a weight meets (0.4 ms)
    and keeps it for ever (0.3 to 0.6 MB, so that a rank grew by 600 MB in 7,000 requests)."""
    if rows <= 32:
        return rows
    step = 16 if rows <= 256 else 64
    return -(-rows // step) * step


def onednn_pack(w_NK: Tensor) -> Tensor:
    """The weight in oneDNN's blocked layout, which spares it the reordering at every call: 8 rows
    of 320 by 4,096 take 123 us instead of 196, and 296 in MKL. Small weights stay as they are."""
    if w_NK.numel() < PACK_ELEMENTS:
        return w_NK
    return torch.ops.mkldnn._reorder_linear_weight(w_NK.contiguous(), PACK_ROWS)


def pad_width(x: Tensor) -> Tensor:
    """The last dimension zero-padded to a safe multiple; zeros do not change a sum of products."""
    odd = -x.shape[-1] % WIDTH_MULTIPLE
    return F.pad(x, (0, odd)) if odd else x


def invariant_linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """As `linear`; each row's bits are independent of the number of rows and of its place."""
    rows, w_KN = x_TK.shape[0], pad_width(w_NK).t()
    x_TK = F.pad(pad_width(x_TK), (0, 0, 0, -rows % ROW_TILE))
    y_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
    for i in range(0, rows, ROW_TILE):
        torch.mm(x_TK[i : i + ROW_TILE], w_KN, out=y_TN[i : i + ROW_TILE])
    y_TN = y_TN[:rows]
    return y_TN if b_N is None else y_TN + b_N


def batch_matmul(x_GTK: Tensor, w_GKN: Tensor) -> Tensor:
    return torch.bmm(x_GTK, w_GKN)


def invariant_batch_matmul(x_GTK: Tensor, w_GKN: Tensor) -> Tensor:
    (_, rows, inner), outer = x_GTK.shape, w_GKN.shape[2]
    x_GTK = F.pad(pad_width(x_GTK), (0, 0, 0, -rows % ROW_TILE))
    w_GKN = pad_width(w_GKN)
    if inner != x_GTK.shape[2]:
        w_GKN = F.pad(w_GKN, (0, 0, 0, x_GTK.shape[2] - inner))
    tiles = [torch.bmm(x_GtK, w_GKN) for x_GtK in x_GTK.split(ROW_TILE, dim=1)]
    return torch.cat(tiles, dim=1)[:, :rows, :outer]


def swiglu(x_TF: Tensor) -> Tensor:
    gate_TF, up_TF = x_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def invariant_swiglu(x_TF: Tensor) -> Tensor:
    """Built on exp: the last elements of a tensor take another path in torch's float32 silu and
    sigmoid, so that there a value's bits depend on how many others there are."""
    gate_TF, up_TF = x_TF.float().chunk(2, dim=-1)
    return (gate_TF / gate_TF.neg().exp_().add_(1.0) * up_TF).to(x_TF.dtype)


def wide_logits(x_BH: Tensor, head_VH: Tensor, out_BV: Tensor | None) -> Tensor:
    """Of 16-bit operands on CUDA, not rounded to their dtype."""
    if out_BV is None:
        return torch.mm(x_BH, head_VH.t(), out_dtype=torch.float32)
    return torch.mm(x_BH, head_VH.t(), out_dtype=torch.float32, out=out_BV)


def _logits_by(matmul: MatMul) -> Logits:
    def logits(x_BH: Tensor, head_VH: Any, out_BV: Tensor | None) -> Tensor:
        logits_BV = matmul(x_BH, head_VH, None).float()
        return logits_BV if out_BV is None else out_BV.copy_(logits_BV)

    return logits


@dataclass(frozen=True)
class Products:
    """The set a model is built with."""

    matmul: MatMul
    batch_matmul: BatchMatMul
    swiglu: GatedUnit
    logits: Logits
    invariant: bool
    pack: Callable[[Tensor], Tensor] = lambda w_NK: w_NK
    """Called once on a weight that nothing but `matmul` will use."""


def choose_products(
    invariant: bool,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
) -> Products:
    """`device` and `dtype` of the model, where known, allow for a faster `matmul`. `fp8`: it takes
    `Fp8Weight` too."""
    on_cuda = device is not None and device.type == "cuda"
    if invariant and on_cuda:
        from crossdock.kernels.linear_invariant import (  # imports triton
            batch_matmul_invariant,
            linear_invariant,
        )

        logits = _logits_by(partial(linear_invariant, out_dtype=torch.float32))
        return Products(linear_invariant, batch_matmul_invariant, invariant_swiglu, logits, True)
    if invariant:
        logits = _logits_by(invariant_linear)
        return Products(invariant_linear, invariant_batch_matmul, invariant_swiglu, logits, True)
    matmul = fp8_linear if fp8 else linear
    if on_cuda and dtype in (torch.bfloat16, torch.float16):
        from crossdock.kernels.swiglu import swiglu_rows  # imports triton; in one pass

        return Products(matmul, batch_matmul, swiglu_rows, wide_logits, False)
    onednn = torch.backends.mkldnn.is_available() and dtype == torch.float32 and not fp8
    if onednn and device is not None and device.type == "cpu":
        logits = _logits_by(onednn_linear)
        return Products(onednn_linear, batch_matmul, swiglu, logits, False, onednn_pack)
    return Products(matmul, batch_matmul, swiglu, _logits_by(matmul), False)
