"""What the sampler does along the vocabulary, so that a row's result depends on the row alone.

torch keeps that on CPUs. On GPUs the order of its sums, and which of equal values `topk` takes,
depend on the number of rows; there softmax and running sums are kernels of our own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ID_BITS = 32


@dataclass(frozen=True)
class RowOps:
    """fp32 [B, V] to the same; `cumsum` to float64; `topk` to (values, ids) [B, k], of equal values
    the lowest ids."""

    softmax: Callable[[Tensor], Tensor]
    log_softmax: Callable[[Tensor], Tensor]
    cumsum: Callable[[Tensor], Tensor]
    topk: Callable[[Tensor, int], tuple[Tensor, Tensor]]


def row_ops(device: torch.device) -> RowOps:
    if device.type == "cuda":
        from crossdock.kernels.rows import cumsum_rows, softmax_rows  # imports triton

        return RowOps(softmax_rows, lambda x: softmax_rows(x, log=True), cumsum_rows, lowest_topk)
    return RowOps(
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1),
        lambda x: x.cumsum(-1, dtype=torch.float64),
        lowest_topk,
    )


def lowest_topk(x_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """By falling value. One integer key per value, all different: the bits of a float sort like it
    does once those below the sign are turned where it is negative; the id stands below them."""
    x_BV = x_BV.contiguous()
    V, bits_BV = x_BV.shape[1], x_BV.view(torch.int32)
    bits_BV = bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)
    low_V = torch.arange(V - 1, -1, -1, device=x_BV.device)
    ids_Bk = ((bits_BV.long() << _ID_BITS) + low_V).topk(k, dim=-1).indices
    return x_BV.gather(1, ids_Bk), ids_Bk
