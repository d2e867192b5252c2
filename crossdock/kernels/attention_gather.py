# mypy: disable-error-code="no-untyped-def"
"""Keys and values of prompts out of an FP8 cache, one sequence after another.

Attention of prompts reads a key for every tile of queries, and its products have no time to convert
codes each time; gathered, keys are converted once and lie as its fastest kernel takes them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

ROWS = 32
TAIL = 128
"""Zeros behind the last key: attention reads keys by tiles of up to so many, and what it masks must
be finite."""


@triton.jit
def _convert(
    codes_ptr, scale_ptr, out_ptr, at, at_scale, to, there, inside, within, dtype: tl.constexpr
):  # fmt: skip
    codes = tl.load(codes_ptr + at, mask=there[:, None] & inside, other=0.0)
    scale = tl.load(scale_ptr + at_scale, mask=there, other=0.0)
    x = cast_rows(codes.to(tl.float32) * scale[:, None], dtype, INTERPRET)
    tl.store(out_ptr + to, x, mask=within[:, None] & inside)


@triton.jit(do_not_specialize=["rows", "sequences"])
def _gather_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_out_ptr, v_out_ptr, slots_ptr, cu_k_ptr, rows,
    sequences, STRIDE: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_SCALE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    end = tl.load(cu_k_ptr + sequences).to(tl.int32)
    if first < end + TAIL:
        g = tl.program_id(1)
        row = first + tl.arange(0, ROWS)
        there = row < end
        within = row < rows
        slot = tl.load(slots_ptr + row, mask=there & within, other=0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = (d < D)[None, :]
        at = (slot * STRIDE + g * STRIDE_G)[:, None] + d[None, :]
        at_scale = slot * STRIDE_SCALE + g
        to = ((row.to(tl.int64) * HEADS + g) * D)[:, None] + d[None, :]
        dtype: tl.constexpr = k_out_ptr.dtype.element_ty
        _convert(k_ptr, k_scale_ptr, k_out_ptr, at, at_scale, to, there, inside, within, dtype)
        _convert(v_ptr, v_scale_ptr, v_out_ptr, at, at_scale, to, there, inside, within, dtype)


def gather_keys(
    k_SgD: Tensor,
    v_SgD: Tensor,
    scales: tuple[Tensor, Tensor],
    slots_N: Tensor,
    cu_k_B1: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values [N, g, D] in `dtype`; `TAIL` zeros after the last key, beyond them anything.

    Args:
        k_SgD, v_SgD: E4M3, of the same strides, last dimension contiguous; scales: fp32 [S, g] of
            each, heads contiguous.
        slots_N: int, of all sequences' keys one after another; cu_k_B1: int, where sequences start
            among them, and their number, at most N.
    """
    (_, g, D), N = k_SgD.shape, slots_N.shape[0]
    k_NgD, v_NgD = (slots_N.new_empty(N, g, D, dtype=dtype) for _ in range(2))
    _gather_kernel[(triton.cdiv(N, ROWS), g)](
        k_SgD, v_SgD, *scales, k_NgD, v_NgD, slots_N, cu_k_B1, N, cu_k_B1.shape[0] - 1,
        STRIDE=k_SgD.stride(0), STRIDE_G=k_SgD.stride(1), STRIDE_SCALE=scales[0].stride(0),
        HEADS=g, D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=ROWS, TAIL=TAIL, num_warps=4,
    )  # fmt: skip
    return k_NgD, v_NgD


def gather_keys_twin(
    k_SgD: Tensor,
    v_SgD: Tensor,
    scales: tuple[Tensor, Tensor],
    slots_N: Tensor,
    cu_k_B1: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """With zeros wherever there is no key."""
    there_N = torch.arange(len(slots_N), device=slots_N.device) < cu_k_B1[-1]
    k_NgD, v_NgD = (
        torch.where(there_N[:, None, None], x[slots_N].float() * scale[slots_N][..., None], 0.0)
        for x, scale in zip((k_SgD, v_SgD), scales, strict=True)
    )
    return k_NgD.to(dtype), v_NgD.to(dtype)
