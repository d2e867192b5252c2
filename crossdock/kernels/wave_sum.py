# mypy: disable-error-code="no-untyped-def"
"""Experts' rows of one wave weighed and added to the sums of their tokens, in fp32.

A wave works on places first <= p < first + W of a grouped layout.
places [N=2, K=2] = (0 5), (-1 4); W = 4: wave 0 adds y[0] to row 0, wave 1 (first = 4) adds y[1]
to row 0 and y[0] to row 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLS = 1024


@triton.jit
def _add_kernel(
    y_ptr, places_ptr, weights_ptr, sum_ptr, rows, top_k, width, first, count,
    K: tl.constexpr, COLS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K)
    while row < rows:
        place = tl.load(places_ptr + row * top_k + k, mask=k < top_k, other=-1) - first
        here = (place >= 0) & (place < count) & (k < top_k)
        weight = tl.load(weights_ptr + row * top_k + k, mask=here, other=0.0)
        number = tl.sum(here.to(tl.int32), axis=0)
        order = tl.where(here, tl.cumsum(here.to(tl.int32), axis=0), 0)
        if FRESH or number > 0:
            start = 0
            while start < width:
                col = start + tl.arange(0, COLS)
                inside = col < width
                total = tl.zeros((COLS,), tl.float32)
                if not FRESH:
                    total = tl.load(sum_ptr + row * width + col, mask=inside, other=0.0)
                done = 0
                while done < number:
                    done += 1
                    at = tl.sum(tl.where(order == done, place, 0), axis=0).to(tl.int64)
                    w = tl.sum(tl.where(order == done, weight, 0.0), axis=0)
                    part = tl.load(y_ptr + at * width + col, mask=inside, other=0.0)
                    total += part.to(tl.float32) * w
                tl.store(sum_ptr + row * width + col, total, mask=inside)
                start += COLS
        row += tl.num_programs(0)


def add_wave(
    sum_NH: Tensor, y_WH: Tensor, places_NK: Tensor, weights_NK: Tensor, first: int, fresh: bool
) -> None:
    """Adds to sum_NH (fp32) what y_WH holds of each row; `fresh`: overwrites it instead."""
    (rows, top_k), width = places_NK.shape, y_WH.shape[1]
    if rows:
        _add_kernel[(min(rows, 4096 if y_WH.is_cuda else 4),)](
            y_WH, places_NK, weights_NK, sum_NH, rows, top_k, width, first, len(y_WH),
            K=max(2, triton.next_power_of_2(top_k)), COLS=_COLS, FRESH=fresh,
        )  # fmt: skip


def add_wave_twin(
    sum_NH: Tensor, y_WH: Tensor, places_NK: Tensor, weights_NK: Tensor, first: int, fresh: bool
) -> None:
    if fresh:
        sum_NH.zero_()
    for k in range(places_NK.shape[1]):
        place = places_NK[:, k].long() - first
        here = (place >= 0) & (place < len(y_WH))
        rows = y_WH[place.clamp(0, len(y_WH) - 1)].float() * weights_NK[:, k, None]
        sum_NH += torch.where(here[:, None], rows, 0.0)
