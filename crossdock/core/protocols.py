"""The borders between rooms: what one may ask of another without knowing it."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from crossdock.core.batch import CapturedStep, ForwardBatch
    from crossdock.core.topology import Placement, Routing

Ticket = Any
"""What combine needs to bring rows home; opaque, each transport has its own."""
Pending = Any
"""A begun dispatch or combine; given to its end."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows that reached this rank, deduplicated, as they came; their number is known on the host.

    x_NH; slots_NK: int64 local slots, -1 elsewhere (also for rows that are padding); weights_NK:
    float32, 0 where the slot is -1.
    """

    x_NH: "Tensor"
    slots_NK: "Tensor"
    weights_NK: "Tensor"


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows as they came, and for each slot a segment of places that says which rows it works on.

    x_NH, with scales_NG [N, H / 128] fp32 where it is FP8; weights_NK as in `Rows`. offsets_S1:
    int32, where each slot's segment begins, multiples of 128, and the end of the last. rows_P:
    int32, the row of each place, -1 where a segment is padded; beyond the last segment anything.
    places_NK: int32, the place of each (row, k), -1 for none. counts_S: int32, rows of each slot.
    """

    x_NH: "Tensor"
    scales_NG: "Tensor | None"
    weights_NK: "Tensor"
    offsets_S1: "Tensor"
    rows_P: "Tensor"
    places_NK: "Tensor"
    counts_S: "Tensor"


@dataclass(frozen=True, eq=False)
class Masked:
    """x_SCH: of slot s the first counts_S[s] (int32) rows of C, with scales_SCG [S, C, H / 128]
    fp32 where it is FP8. expected_rows: of a slot, if the experts were equally popular."""

    x_SCH: "Tensor"
    scales_SCG: "Tensor | None"
    counts_S: "Tensor"
    expected_rows: int


Received = Rows | Grouped | Masked


class Transport(Protocol):
    """Moves rows to the ranks that hold their experts, and home. Built for one topology.

    `per_expert` False: combine takes y_NH, rows already reduced (weighted, fp32) over the experts
    of this rank, and home sums them in rank order. True (invariant mode): combine takes y_NKH,
    unweighted, and home weighs and sums them in top-k order. Rows travel in x's dtype; sums are
    fp32.

    `on_device` False: `Rows` arrive. True: `Grouped` or `Masked` ones, and nothing is read on the
    host; combine takes what the experts made of them, unweighted: y_PH by place or y_SCH. Of
    `Grouped` rows it also takes y_NH, reduced.

    `max_tokens`: the most that dispatch takes at once; None: any number.
    """

    per_expert: bool
    on_device: bool

    @property
    def max_tokens(self) -> int | None: ...

    def dispatch_begin(
        self, x_TH: "Tensor", routing: "Routing", most_tokens: int | None = None
    ) -> Pending:
        """`most_tokens`: of any rank, where all ranks know it; it may decide how rows travel."""
        ...

    def dispatch_end(self, pending: Pending) -> "tuple[Received, Ticket]": ...
    def dispatch(
        self, x_TH: "Tensor", routing: "Routing", most_tokens: int | None = None
    ) -> "tuple[Received, Ticket]":
        """Both, where nothing is to run between: in one launch, on a GPU."""
        ...

    def combine_begin(self, y: "Tensor", ticket: Ticket) -> Pending: ...
    def combine_end(self, pending: Pending) -> "Tensor": ...
    def combine(self, y: "Tensor", ticket: Ticket) -> "Tensor": ...
    def bytes_sent(self) -> dict[str, int]:
        """Totals since the start by path: "self", "node", "remote"."""
        ...

    def check(self) -> None:
        """Raises what went wrong in exchanges that the device is past, such as RankLost; then
        nothing that came since can be used."""
        ...

    def close(self) -> None: ...


class Lockstep(Protocol):
    """Every rank gives a few integers and gets everybody's, or RankLost after the deadline."""

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]: ...


class Group(Protocol):
    """The ranks of one attention group, all with the same batch of T tokens. Attention and dense
    layers see all of them with a part of the weights each; between layers, and through experts, a
    rank carries its share of the tokens, t of T: `share_of(T, size, rank)`.

    All ranks of the group call the same methods in the same order. Raises RankLost where one did
    not come within the deadline (on a GPU: where the process group notices).
    """

    size: int
    rank: int

    def all_gather(self, x_tH: "Tensor", tokens: int) -> "Tensor":
        """[T, ...] of the shares of all ranks, T = `tokens`."""
        ...

    def reduce_scatter(self, x_TH: "Tensor") -> "Tensor":
        """This rank's share of the sum over the ranks."""
        ...

    def broadcast(self, x: "Tensor") -> "Tensor":
        """That of rank 0; the others' say shape and dtype. It may be written into `x`."""
        ...


class KV(Protocol):
    """Cached tokens: the tensors of each layer that its attention wants, [slots, ...]."""

    page_size: int

    def layer(self, index: int) -> "tuple[Tensor, ...]": ...
    def clear(self, pages: int) -> None:
        """Zeroes the first `pages` pages."""
        ...


class SlotLayer(Protocol):
    """An MoE layer, as far as its slots go."""

    def slot_tensors(self) -> "tuple[Tensor, ...]":
        """What the experts are made of, [S, ...] each; a slot's part is contiguous."""
        ...

    def place(self, placement: "Placement") -> None:
        """Between steps: tokens go to the slots of `placement` from now on."""
        ...

    def router_bias(self) -> "tuple[Tensor, Tensor]":
        """`(tokens_E, bias_E)` of a router whose bias is adjusted: int64, the tokens of this rank
        that chose each expert, a total; fp32, written between steps."""
        ...


class Model(Protocol):
    moe_layers: "Sequence[SlotLayer]"

    def forward(self, batch: "ForwardBatch", kv: KV) -> "Generator[None, None, Tensor]":
        """Yields where communication is in flight; returns hidden_TH after the last norm."""
        ...

    def logits(self, hidden_BH: "Tensor", out_BV: "Tensor | None" = None) -> "Tensor":
        """float32 [B, vocab], in `out_BV` where that is given."""
        ...

    def lay_out(self, step: "CapturedStep") -> None:
        """What attention wants to know on the host of a step that is captured or replayed next."""
        ...
