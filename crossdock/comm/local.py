"""The transport of one rank: nothing travels, but rows are rounded and summed as on the wire."""

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.comm.sums import weigh_and_sum
from crossdock.core import Routing, Rows


@dataclass(frozen=True, eq=False)
class LocalTicket:
    routing: Routing
    dtype: torch.dtype


class LocalTransport:
    def __init__(self, per_expert: bool):
        self.per_expert, self.on_device = per_expert, False
        self.max_tokens = None
        self._bytes = 0

    def dispatch_begin(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Tensor, Routing]:
        return x_TH, routing

    def dispatch_end(self, pending: tuple[Tensor, Routing]) -> tuple[Rows, LocalTicket]:
        x_TH, routing = pending
        weights_TK = routing.weights_TK.masked_fill(routing.slots_TK < 0, 0.0)
        self._bytes += x_TH.numel() * x_TH.element_size()
        received = Rows(x_TH, routing.slots_TK, weights_TK)
        return received, LocalTicket(routing, x_TH.dtype)

    def dispatch(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Rows, LocalTicket]:
        return self.dispatch_end(self.dispatch_begin(x_TH, routing, most_tokens))

    def combine_begin(self, y: Tensor, ticket: LocalTicket) -> tuple[Tensor, LocalTicket]:
        self._bytes += y.numel() * ticket.dtype.itemsize
        return y.to(ticket.dtype), ticket

    def combine_end(self, pending: tuple[Tensor, LocalTicket]) -> Tensor:
        y, ticket = pending
        slots_TK = ticket.routing.slots_TK
        if self.per_expert:
            return weigh_and_sum(y, ticket.routing.weights_TK, slots_TK)
        return y.masked_fill((slots_TK < 0).all(1, keepdim=True), 0.0)

    def combine(self, y: Tensor, ticket: LocalTicket) -> Tensor:
        return self.combine_end(self.combine_begin(y, ticket))

    def bytes_sent(self) -> dict[str, int]:
        return {"self": self._bytes, "node": 0, "remote": 0}

    def check(self) -> None:
        """Errors have been raised where they came up."""

    def close(self) -> None:
        pass
