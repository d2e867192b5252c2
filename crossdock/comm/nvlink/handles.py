"""What a dispatch gives and a combine takes: device tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Arrived:
    """rows [N, H] and scales [N, H / 128] (None unless FP8) in the staging; slots_NK int64, -1
    where nothing is here; weights_NK fp32. tokens_R: int32, how many each source sent; counts_S:
    int32, rows of each slot. Rows are valid until the combine of this exchange."""

    rows: Tensor
    scales: Tensor | None
    slots_NK: Tensor
    weights_NK: Tensor
    tokens_R: Tensor
    counts_S: Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """offsets int32 [S + 1], aligned; rows int32: row of each place, -1 for alignment (beyond
    offsets[S]: anything); places_NK int32, -1 for none."""

    offsets: Tensor
    rows: Tensor
    places_NK: Tensor


@dataclass(frozen=True, eq=False)
class Masked:
    """x [S, C, H], scales [S, C, H / 128] or None, counts_S int32. places int32 and weights fp32
    [N, 16]: slot * C + place of each copy, -1 for none."""

    x: Tensor
    scales: Tensor | None
    counts_S: Tensor
    tokens_R: Tensor
    places: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Sending:
    """What goes home; see `combine_send`."""

    mode: int
    y: Tensor
    slots: Tensor
    weights: Tensor
    tokens_R: Tensor
