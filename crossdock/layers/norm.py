"""Root-mean-square norm (arXiv 1910.07467)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Callable[[Tensor, Tensor, float], Tensor]
Add = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class RMSNorm:
    """Over the last dimension, accumulated in float32; `weight` [D]. `invariant`: a row's bits
    depend on the row alone, on GPUs too, where torch's sums depend on how rows lie in memory."""

    def __init__(self, weight_D: Tensor, eps: float, invariant: bool = False):
        self.weight_D, self.eps = weight_D, eps
        self._norm: Norm = _norm_torch
        self._add: Add = _add_torch
        if not weight_D.is_cuda:
            return
        # They import triton.
        if invariant:
            from crossdock.kernels.rms_norm import add_rms_norm_invariant, rms_norm_invariant

            self._norm, self._add = rms_norm_invariant, add_rms_norm_invariant
        elif weight_D.dtype != torch.float32:
            from crossdock.kernels.rms_norm import add_rms_norm

            self._add = add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight_D, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """`(norm(sum), sum)` of `sum = x + residual`; one pass over both on a GPU in 16 bits."""
        return self._add(x_TD, residual_TD, self.weight_D, self.eps)


def _norm_torch(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def _add_torch(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total_TD = residual_TD + x_TD
    return F.rms_norm(total_TD, weight_D.shape, weight_D, eps), total_TD
