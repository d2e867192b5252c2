"""The nvlink exchange of one case, offered as works to be timed; `comm_check` checks it before."""

from collections.abc import Callable
from copy import copy
from typing import Self

import torch
from torch import Tensor

from crossdock.bench.comm_case import CommCase, Inputs
from crossdock.bench.meter import Work
from crossdock.bench.rank_world import symmetric_buffer
from crossdock.comm import World
from crossdock.comm.nvlink import Arrived, Masked, NvlinkExchange, NvlinkLayout, Segments
from crossdock.kernels.grouped_gemm_gather import gather_rows
from crossdock.kernels.quant import FP8
from crossdock.kernels.rounding import BLOCK

ALIGNMENT = 128
SETS = 2

Gathered = tuple[Tensor, Tensor | None]


class NvlinkCase:
    """x_SCH, scale_SCB: where masked rows go; None in normal mode. `fused`: both halves of dispatch
    and of combine in one launch."""

    def __init__(self, case: CommCase, world: World, inputs: Inputs, programs: int | None = None):
        self.case, self.inputs, self.fused = case, inputs, True
        self._layout = NvlinkLayout(
            case.ranks, case.max_tokens, case.hidden, case.top_k, 2, case.fp8, case.per_expert
        )
        self._buffer = symmetric_buffer(world, self._layout.nbytes)
        self.exchange = NvlinkExchange(
            world.rank, self._layout, self._buffer, case.slots, torch.bfloat16,
            world.waiter.deadline_s, programs,
        )  # fmt: skip
        self.x_SCH: Tensor | None = None
        self.scale_SCB: Tensor | None = None
        if self._layout.low_latency:
            shape = (case.slots, self._layout.cells, case.hidden)
            dtype = FP8 if case.fp8 else torch.bfloat16
            self.x_SCH = torch.empty(shape, dtype=dtype, device=world.device)
            if case.fp8:
                blocks = (*shape[:2], case.hidden // BLOCK)
                self.scale_SCB = torch.empty(blocks, device=world.device)

    def in_two_launches(self) -> Self:
        """The same buffers."""
        other = copy(self)
        other.fused = False
        return other

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row, its scales included; its record is not counted."""
        return self._layout.row_bytes

    def poison(self) -> None:
        """NaN wherever rows, records, weights and scales go; flags stay as they are."""
        layout = self._layout
        for at in range(SETS):
            start = at * layout.set_bytes
            self._buffer.local[start + layout.records : start + layout.set_bytes].fill_(0xFF)
        for room in (self.x_SCH, self.scale_SCB):
            if room is not None:
                room.view(torch.uint8).fill_(0xFF)

    def is_default(self, what: str) -> bool:
        """Whether the transport does it in this form; see `NvlinkTransport`."""
        return self.fused

    def rows(self, at: int) -> Arrived:
        """Top-k ids to rows and counts at their rank."""
        if self.fused:
            return self.exchange.dispatch_rows_fused(at, *self._given)
        self.exchange.dispatch_send(at, *self._given)
        return self.exchange.dispatch_rows(at)

    def masked(self, at: int) -> Masked:
        """Top-k ids to rows ready for a masked product."""
        assert self.x_SCH is not None
        if self.fused:
            return self.exchange.dispatch_masked_fused(at, *self._given, self.x_SCH, self.scale_SCB)
        self.exchange.dispatch_send(at, *self._given)
        return self.exchange.dispatch_masked(at, self.x_SCH, self.scale_SCB)

    def grouped(self, at: int) -> tuple[Arrived, Segments, Gathered]:
        """Top-k ids to rows ready for a grouped product: gathered into aligned segments."""
        arrived = self.rows(at)
        segments = self.exchange.place(at, arrived, ALIGNMENT)
        end = segments.offsets[-1:]
        return arrived, segments, gather_rows(arrived.rows, arrived.scales, segments.rows, end)

    def home_of_rows(self, at: int, y_NH: Tensor, arrived: Arrived) -> Tensor:
        """y: reduced, or unweighted for each expert [N, K, H]."""
        if self.fused:
            return self.exchange.combine_rows_fused(at, y_NH, arrived, *self._chosen)
        self.exchange.combine_rows(at, y_NH, arrived)
        return self.exchange.combine_home(at, *self._chosen, y_NH)

    def home_of_segments(
        self, at: int, y_PH: Tensor, arrived: Arrived, segments: Segments
    ) -> Tensor:
        if self.fused:
            return self.exchange.combine_segments_fused(at, y_PH, arrived, segments, *self._chosen)
        self.exchange.combine_segments(at, y_PH, arrived, segments)
        return self.exchange.combine_home(at, *self._chosen)

    def home_of_masked(self, at: int, y_SCH: Tensor, masked: Masked) -> Tensor:
        if self.fused:
            return self.exchange.combine_masked_fused(at, y_SCH, masked, *self._chosen)
        self.exchange.combine_masked(at, y_SCH, masked)
        return self.exchange.combine_home(at, *self._chosen)

    def works(self) -> dict[str, Work]:
        """By what is timed. Sets take turns, so that dispatches alone are safe in a row."""
        runs: dict[str, Callable[[int], object]] = {"dispatch_to_rows": self.rows}
        if self.x_SCH is not None:
            runs |= {"dispatch_to_ready": self.masked, **self._masked_combine()}
        else:
            runs["dispatch_to_ready"] = self.grouped
            if not self.case.fp8:  # what comes home is BF16 in any case
                runs |= self._grouped_combine()
        return {name: Work(_in_turn(run)) for name, run in runs.items()}

    @property
    def _given(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs.x_TH, *self._chosen

    @property
    def _chosen(self) -> tuple[Tensor, Tensor]:
        return self.inputs.routing.slots_TK, self.inputs.routing.weights_TK

    def _masked_combine(self) -> dict[str, Callable[[int], object]]:
        assert self.x_SCH is not None
        tickets = [self.masked(at) for at in range(SETS)]
        y_SCH = _outputs(self.x_SCH.shape, self.x_SCH.device)
        return {
            "combine": lambda at: self.home_of_masked(at, y_SCH, tickets[at]),
            "round_trip": lambda at: self.home_of_masked(at, y_SCH, self.masked(at)),
        }

    def _grouped_combine(self) -> dict[str, Callable[[int], object]]:
        tickets = [self.grouped(at)[:2] for at in range(SETS)]
        arrived, segments = tickets[0]
        y_PH = _outputs((len(segments.rows), self.case.hidden), segments.rows.device)
        runs: dict[str, Callable[[int], object]] = {
            "combine": lambda at: self.home_of_segments(at, y_PH, *tickets[at])
        }
        if not self.case.per_expert:
            y_NH = y_PH[: len(arrived.rows)]
            runs["combine_of_reduced"] = lambda at: self.home_of_rows(at, y_NH, tickets[at][0])
            runs["round_trip"] = lambda at: self.home_of_rows(at, y_NH, self.rows(at))
        return runs


def _in_turn(run: Callable[[int], object]) -> Callable[[int], object]:
    return lambda i: run(i % SETS)


def _outputs(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Values of the size that experts give, not zeros: those switch fewer wires."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
