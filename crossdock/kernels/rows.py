# mypy: disable-error-code="no-untyped-def"
"""Softmax and running sums over the rows of a matrix, a program per row from front to back.

torch's on GPUs order a row's sums by the number of rows, or by where the row begins in memory, and
its running sums are not the same in every run. The sampler's promise is that a row's result depends
on the row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.linear_invariant import aligned

_SOFTMAX_BLOCK, _CUMSUM_BLOCK = 4096, 2048


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, V, LOG: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * V
    v = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + row + start + v, mask=start + v < V, other=-float("inf"))
        best = tl.maximum(best, x)
    top = tl.max(best, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + row + start + v, mask=start + v < V, other=-float("inf"))
        sums += tl.exp(x - top)
    total = tl.sum(sums, axis=0)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + row + start + v, mask=inside, other=0.0)
        out = x - top - tl.log(total) if LOG else tl.exp(x - top) / total
        tl.store(out_ptr + row + start + v, out, mask=inside)


@triton.jit
def _cumsum_kernel(x_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * V
    v = tl.arange(0, BLOCK)
    before = tl.zeros((1,), tl.float64)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + row + start + v, mask=inside, other=0.0).to(tl.float64)
        sums = tl.cumsum(x, axis=0)
        tl.store(out_ptr + row + start + v, before + sums, mask=inside)
        before += tl.sum(tl.where(v == BLOCK - 1, sums, 0.0), axis=0)


def softmax_rows(x_BV: Tensor, log: bool = False) -> Tensor:
    """fp32 [B, V] softmax, or its logarithm, of fp32. Where a row is -inf throughout: NaN."""
    x_BV = aligned(x_BV)
    (B, V), out_BV = x_BV.shape, torch.empty_like(x_BV)
    if B:
        _softmax_kernel[(B,)](x_BV, out_BV, V, LOG=log, BLOCK=_SOFTMAX_BLOCK, num_warps=8)
    return out_BV


def cumsum_rows(x_BV: Tensor) -> Tensor:
    """float64 [B, V] of fp32."""
    x_BV = aligned(x_BV)
    (B, V), out_BV = x_BV.shape, torch.empty_like(x_BV, dtype=torch.float64)
    if B:
        _cumsum_kernel[(B,)](x_BV, out_BV, V, BLOCK=_CUMSUM_BLOCK, num_warps=8)
    return out_BV
