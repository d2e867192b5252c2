# mypy: disable-error-code="no-untyped-def"
"""Rows, with their scales if they have some, gathered for kernels that read consecutive rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_kernel(
    x_ptr, scale_ptr, rows_ptr, end_ptr, out_ptr, out_scale_ptr, stride_n, stride_b, blocks,
    width: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    end = tl.load(end_ptr)
    n = tl.program_id(0).to(tl.int64)
    while n < end:
        row = tl.load(rows_ptr + n).to(tl.int64)
        valid = row >= 0
        for start in range(0, width, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(x_ptr + row * width + col, mask=valid & (col < width), other=0)
            tl.store(out_ptr + n * width + col, x, mask=col < width)
        if BLOCKS:
            block = tl.arange(0, BLOCKS)
            here = block < blocks
            at = scale_ptr + row * stride_n + block * stride_b
            scale = tl.load(at, mask=valid & here, other=0.0)
            tl.store(out_scale_ptr + n * blocks + block, scale, mask=here)
        n += tl.num_programs(0)


def gather_rows(
    x_TI: Tensor, scale_TB: Tensor | None, rows_N: Tensor, end: Tensor
) -> tuple[Tensor, Tensor | None]:
    """[N, I] (and scales [N, I / 128] where there are any) of rows_N, int32, for n < end (int32
    [1], on the device).

    Index -1 gives zeros. Rows from end on are unwritten.
    """
    rows, width = len(rows_N), x_TI.shape[1]
    x_NI = torch.empty((rows, width), dtype=x_TI.dtype, device=x_TI.device)
    blocks, strides, scale_NB = 0, (0, 0), None
    if scale_TB is not None:
        blocks, strides = scale_TB.shape[1], (scale_TB.stride(0), scale_TB.stride(1))
        scale_NB = torch.empty((rows, blocks), dtype=torch.float32, device=x_TI.device)
    if rows:
        # As bytes: a zero is a zero in all dtypes, and the interpreter copies bytes exactly.
        _gather_kernel[(min(rows, 4096 if end.is_cuda else 4),)](
            x_TI.view(torch.uint8), scale_TB, rows_N, end, x_NI.view(torch.uint8), scale_NB,
            *strides, blocks, width=width * x_TI.element_size(),
            BLOCKS=triton.next_power_of_2(blocks) if blocks else 0, COLS=2048,
        )  # fmt: skip
    return x_NI, scale_NB


def gather_rows_twin(
    x_TI: Tensor, scale_TB: Tensor | None, rows_N: Tensor
) -> tuple[Tensor, Tensor | None]:
    """All rows of rows_N."""
    here_N1 = (rows_N >= 0)[:, None]
    index = rows_N.clamp_min(0).long()
    x_NI = (x_TI.view(torch.uint8)[index] * here_N1).view(x_TI.dtype)
    return x_NI, None if scale_TB is None else scale_TB[index] * here_N1
