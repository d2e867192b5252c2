"""Norm and residual together are the norm of the sum."""

import torch

from crossdock.layers import RMSNorm


def test_add_is_the_sum_and_its_norm():
    norm = RMSNorm(torch.rand(24) + 0.5, 1e-6)
    x, residual = torch.randn(2, 5, 24)
    out, total = norm.add(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(out, norm(total))
    scale = (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(out, total * scale * norm.weight_D)
