# mypy: disable-error-code="no-untyped-def"
"""Root-mean-square norm (arXiv 1910.07467) with the residual added in the same pass."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.linear_invariant import aligned
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows


@triton.jit
def normed(x, weight, eps, WIDTH: tl.constexpr):
    """fp32 [M, I] over its last axis; columns beyond WIDTH are zero."""
    square = tl.sum(x * x, axis=1) / WIDTH
    return x * (1.0 / tl.sqrt(square + eps))[:, None] * weight[None, :]


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, stride_x,
    ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual_ptr + row * WIDTH + i, mask=inside, other=0.0)
        x = cast_rows(x + other.to(tl.float32), dtype, INTERPRET)
        tl.store(sum_ptr + row * WIDTH + i, x, mask=inside)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    out = tl.reshape(normed(x[None, :], weight, eps, WIDTH), (BLOCK,))
    tl.store(out_ptr + row * WIDTH + i, cast_rows(out, dtype, INTERPRET), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out, total = torch.empty_like(x, memory_format=torch.contiguous_format), x
    if residual is not None:
        total = torch.empty_like(out)
    if rows:
        block = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, total, out, eps, x.stride(0),
            ADD=residual is not None, WIDTH=width, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out, total


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """[T, H] in x's dtype, computed in fp32. Rows may be strided, columns not."""
    return _launch(x_TH, None, weight_H, eps)[0]


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`(norm(sum), sum)` of `sum = x + residual`, rounded to x's dtype before it is normed.

    Rows of x may be strided; the residual is contiguous and of x's dtype.
    """
    return _launch(x_TH, residual_TH, weight_H, eps)


def rms_norm_invariant(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, of [..., D] with any strides. A row's sum has one order: the compiler is told
    the same of all rows, that they begin on 16 bytes and follow one another."""
    return rms_norm(aligned(x).view(-1, x.shape[-1]), weight_D, eps).view(x.shape)


def add_rms_norm_invariant(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm`, with any strides."""
    return add_rms_norm(aligned(x_TH), aligned(residual_TH), weight_H, eps)


def add_rms_norm_twin(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x_TH + residual_TH
    out = F.rms_norm(total.float(), weight_H.shape, weight_H.float(), eps)
    return out.to(x_TH.dtype), total
