"""The borders between rooms: what one may ask of another without knowing it."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from crossdock.core.batch import ForwardBatch
    from crossdock.core.topology import Routing

Ticket = Any
"""What combine needs to bring rows home; opaque, each transport has its own."""
Pending = Any
"""A begun dispatch or combine; given to its end."""


@dataclass(frozen=True, eq=False)
class Received:
    """Rows that reached this rank.

    layout "rows": x_NH deduplicated, as they came; slots_NK: int64 local slots, -1 elsewhere (also
    for rows that are padding); weights_NK: float32, 0 where the slot is -1.
    """

    layout: Literal["rows", "grouped", "masked"]
    x_NH: "Tensor"
    slots_NK: "Tensor"
    weights_NK: "Tensor"


class Transport(Protocol):
    """Moves rows to the ranks that hold their experts, and home. Built for one topology.

    `per_expert` False: combine takes y_NH, rows already reduced (weighted, fp32) over the experts
    of this rank, and home sums them in rank order. True (invariant mode): combine takes y_NKH,
    unweighted, and home weighs and sums them in top-k order. Rows travel in x's dtype; sums are
    fp32.
    """

    per_expert: bool

    def dispatch_begin(self, x_TH: "Tensor", routing: "Routing") -> Pending: ...
    def dispatch_end(self, pending: Pending) -> "tuple[Received, Ticket]": ...
    def combine_begin(self, y: "Tensor", ticket: Ticket) -> Pending: ...
    def combine_end(self, pending: Pending) -> "Tensor": ...
    def bytes_sent(self) -> dict[str, int]:
        """Totals since the start by path: "self", "node", "remote"."""
        ...

    def close(self) -> None: ...


class Lockstep(Protocol):
    """Every rank gives a few integers and gets everybody's, or RankLost after the deadline."""

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]: ...


class Group(Protocol):
    """The ranks that share one attention group; of one rank until tensor parallelism."""

    size: int
    rank: int

    def all_reduce(self, x: "Tensor") -> "Tensor": ...


class KV(Protocol):
    """Cached tokens: the tensors of each layer that its attention wants, [slots, ...]."""

    page_size: int

    def layer(self, index: int) -> "tuple[Tensor, ...]": ...


class Model(Protocol):
    def forward(self, batch: "ForwardBatch", kv: KV) -> "Generator[None, None, Tensor]":
        """Yields where communication is in flight; returns hidden_TH after the last norm."""
        ...

    def logits(self, hidden_BH: "Tensor") -> "Tensor":
        """float32 [B, vocab]."""
        ...
