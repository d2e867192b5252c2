"""The dense SwiGLU MLP (arXiv 2002.05202): dense layers and shared experts."""

from torch import Tensor

from crossdock.core import Group
from crossdock.layers.linear import Products


class DenseMLP:
    """`gate_up` [2F, H], gate rows first, and `down` [H, F], as `Products.matmul` takes them, each
    with its bias or None."""

    def __init__(
        self,
        gate_up_FH: Tensor,
        down_HF: Tensor,
        products: Products,
        group: Group,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ):
        self.gate_up_FH, self.down_HF = gate_up_FH, down_HF
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.products, self.group = products, group

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] to this rank's share [t, H]."""
        p = self.products
        y_TF = p.swiglu(p.matmul(x_TH, self.gate_up_FH, self.gate_up_bias))
        return self.group.reduce_scatter(p.matmul(y_TF, self.down_HF, self.down_bias))
