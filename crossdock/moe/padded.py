"""An MoE layer wider than the model around it: FP8 takes hidden sizes in multiples of 128."""

from collections.abc import Callable, Generator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from crossdock.core import Placement
from crossdock.moe.layer import MoELayer


class PaddedMoELayer:
    """`layer` over rows padded with zeros, which its weights answer with zeros."""

    def __init__(self, layer: MoELayer, hidden: int, wide: int):
        self.layer, self._hidden, self._more = layer, hidden, wide - hidden

    def slot_tensors(self) -> tuple[Tensor, ...]:
        return self.layer.slot_tensors()

    def place(self, placement: Placement) -> None:
        self.layer.place(placement)

    def router_bias(self) -> tuple[Tensor, Tensor]:
        return self.layer.router_bias()

    def forward(self, x_TH: Tensor, *rest: Any) -> Generator[None, None, Tensor]:
        """As `MoELayer.forward`."""
        wide_TH = yield from self.layer.forward(F.pad(x_TH, (0, self._more)), *rest)
        return wide_TH[:, : self._hidden]


def padded_shared(
    shared: Callable[[Tensor], Tensor], hidden: int, wide: int
) -> Callable[[Tensor], Tensor]:
    """A shared expert for the layer within."""
    return lambda x_TH: F.pad(shared(x_TH[:, :hidden]), (0, wide - hidden))
