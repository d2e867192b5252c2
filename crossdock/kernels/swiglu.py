# mypy: disable-error-code="no-untyped-def"
"""silu(gate) * up over as many rows as are in use, known on the device only; not quantised.

x [N=2, 2F=4] = (g0 g1 u0 u1), rows in use 1: out[0] = silu(g0) * u0, silu(g1) * u1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

_COLS = 512


@triton.jit
def _row(x_ptr, out_ptr, row, width, COLS: tl.constexpr, INTERPRET: tl.constexpr):
    start = 0
    while start < width:
        col = start + tl.arange(0, COLS)
        inside = col < width
        gate = tl.load(x_ptr + row * (2 * width) + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * (2 * width) + width + col, mask=inside, other=0.0)
        value = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
        value = cast_rows(value, out_ptr.dtype.element_ty, INTERPRET)
        tl.store(out_ptr + row * width + col, value, mask=inside)
        start += COLS


@triton.jit(do_not_specialize=["rows"])
def _grouped_kernel(
    x_ptr, out_ptr, end_ptr, rows, width, ALL: tl.constexpr, COLS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    end = rows
    if not ALL:
        end = tl.load(end_ptr)
    row = tl.program_id(0).to(tl.int64)
    while row < end:
        _row(x_ptr, out_ptr, row, width, COLS, INTERPRET)
        row += tl.num_programs(0)


def swiglu_rows(x_N2F: Tensor, end: Tensor | None = None) -> Tensor:
    """[N, F] of contiguous [N, 2F], gate first; rows from `end` (int32 [1], on the device) on are
    unwritten."""
    rows, width = x_N2F.shape[0], x_N2F.shape[1] // 2
    out_NF = torch.empty((rows, width), dtype=x_N2F.dtype, device=x_N2F.device)
    if rows:
        _grouped_kernel[(min(rows, 4096 if x_N2F.is_cuda else 4),)](
            x_N2F, out_NF, x_N2F if end is None else end, rows, width, ALL=end is None,
            COLS=_COLS, INTERPRET=INTERPRET.value,
        )  # fmt: skip
    return out_NF


def swiglu_twin(x_N2F: Tensor) -> Tensor:
    """All rows (leading dimensions are kept)."""
    gate, up = x_N2F.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x_N2F.dtype)
