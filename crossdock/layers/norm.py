"""Root-mean-square norm (arXiv 1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """Over the last dimension, accumulated in float32; `weight` [D]."""

    def __init__(self, weight_D: Tensor, eps: float):
        self.weight_D, self.eps = weight_D, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight_D.shape, self.weight_D, self.eps)
