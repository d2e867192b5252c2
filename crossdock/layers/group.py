"""The attention group of one rank: nothing to exchange."""

from torch import Tensor


class SoloGroup:
    """`core.Group` of size 1."""

    def __init__(self) -> None:
        self.size, self.rank = 1, 0

    def all_gather(self, x_tH: Tensor, tokens: int) -> Tensor:
        return x_tH

    def reduce_scatter(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def broadcast(self, x: Tensor) -> Tensor:
        return x
