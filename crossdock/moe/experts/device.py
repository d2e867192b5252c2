"""Experts over `Grouped` and `Masked` rows, whose numbers only the device knows.

Grouped rows have room for the case that all tokens come to this rank. Where the workspace has not,
the places are worked on in waves, enough of them for that case; a wave without rows costs its
launches.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crossdock.core import CapacityError, Grouped, Masked, Received
from crossdock.kernels.grouped_gemm import ALIGN, Segments
from crossdock.kernels.wave_sum import add_wave


@dataclass(frozen=True, eq=False)
class Wave:
    """W places: rows_W (int32) says which of x_NH each works on, -1 for none."""

    x_NH: Tensor
    scales_NG: Tensor | None
    rows_W: Tensor
    segments: Segments

    @property
    def end(self) -> Tensor:
        """int32 [1], places in use."""
        return self.segments.offsets_S1[-1:]


class Products(Protocol):
    """The two projections and what lies between, in one dtype by one library.

    `place_bytes`: of memory that a place takes at most. `slot_tensors`: as of `Experts`.
    """

    name: str
    place_bytes: int

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]: ...

    def grouped(self, wave: Wave) -> Tensor:
        """y_WH, unweighted; undefined where no row is."""
        ...

    def masked(self, rows: Masked, rows_S: Tensor) -> Tensor:
        """y_SCH, unweighted; undefined beyond the counts, which are added to rows_S."""
        ...


class DeviceExperts:
    """y_PH by place, y_SCH, or, after several waves, y_NH, reduced. rows_S: where the rows of each
    slot are counted. `workspace`: bytes that grouped rows may take."""

    def __init__(self, products: Products, workspace: int, per_expert: bool, rows_S: Tensor):
        self.products, self._per_expert, self._rows_S = products, per_expert, rows_S
        self.wave_places = max(ALIGN, workspace // products.place_bytes // ALIGN * ALIGN)
        self.slot_tensors = products.slot_tensors
        # As long as a wave can be, at once: captured steps keep its address.
        self._starts = torch.arange(
            0, self.wave_places, ALIGN, dtype=torch.int32, device=rows_S.device
        )

    def __call__(self, received: Received) -> Tensor:
        assert isinstance(received, Grouped | Masked)
        if isinstance(received, Masked):
            return self.products.masked(received, self._rows_S)
        self._rows_S.add_(received.counts_S)
        places, step = len(received.rows_P), self.wave_places
        if places <= step:
            return self.products.grouped(self._wave(received, 0, places))
        if self._per_expert:
            raise CapacityError(
                f"{places} places of {self.products.place_bytes} bytes exceed the experts' "
                f"workspace of {step}; rows that travel per expert need all at once: "
                "lower max_num_batched_tokens or raise expert_workspace_gib"
            )
        N, H = received.x_NH.shape
        sum_NH = torch.empty(N, H, dtype=torch.float32, device=received.x_NH.device)
        for first in range(0, places, step):
            y_WH = self.products.grouped(self._wave(received, first, min(step, places - first)))
            add_wave(sum_NH, y_WH, received.places_NK, received.weights_NK, first, fresh=first == 0)
            del y_WH  # else it would be held beside all that the next wave takes
        return sum_NH.to(torch.bfloat16)

    def _wave(self, rows: Grouped, first: int, count: int) -> Wave:
        offsets_S1 = rows.offsets_S1
        if first or count < len(rows.rows_P):
            offsets_S1 = (offsets_S1 - first).clamp_(0, count)
        tile_slots_M = torch.searchsorted(
            offsets_S1[1:], self._starts[: count // ALIGN], right=True, out_int32=True
        )
        rows_W = rows.rows_P[first : first + count]
        return Wave(rows.x_NH, rows.scales_NG, rows_W, Segments(offsets_S1, tile_slots_M))
