"""The transport over the exchanges: which of them a step uses, and how rows are handed on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.exchange import Arrived, NvlinkExchange, Segments
from crossdock.comm.nvlink.exchange import Masked as MaskedRows
from crossdock.comm.nvlink.layout import SETS, NvlinkLayout
from crossdock.comm.paths import PathBytes
from crossdock.comm.shared import ShmLayout
from crossdock.comm.symmetric import SymmetricBuffer, allocate_cuda, allocate_host
from crossdock.comm.world import World
from crossdock.core import (
    CapacityError,
    ConfigError,
    CrossdockError,
    Grouped,
    Masked,
    Received,
    Routing,
    Rows,
)
from crossdock.kernels.rounding import dequantise_blocks_torch

SEGMENT_ALIGNMENT = 128
"""Rows of a tile of the grouped products."""


@dataclass(eq=False)
class _Lane:
    """An exchange and which of its buffer sets comes next."""

    exchange: NvlinkExchange
    next: int = 0
    in_flight: list[bool] = field(default_factory=lambda: [False] * SETS)
    told: list[list[int]] = field(default_factory=list)

    def take(self) -> int:
        at = self.next
        if self.in_flight[at]:
            raise CrossdockError(f"{SETS} exchanges are in flight; end a combine first")
        self.next = (at + 1) % SETS
        self.in_flight[at] = True
        return at


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """`tensors`: x_TH, slots_TK and weights_TK, read while rows are on the way."""

    lane: _Lane
    at: int
    tensors: tuple[Tensor, Tensor, Tensor]
    most_tokens: int


@dataclass(frozen=True, eq=False)
class NvlinkTicket:
    """`masked`, or `arrived` and, unless rows were handed on as they came, `segments`."""

    sent: _Dispatch
    arrived: Arrived | None = None
    segments: Segments | None = None
    masked: MaskedRows | None = None


class NvlinkTransport:
    """No host synchronisation. Lost ranks are told at the next call after the device noticed.

    `normal` serves any step; `low_latency`, where given, those in which no rank has more tokens
    than it takes. Without `on_device` every cell of the staging is a row, N = R * T of the layout.
    """

    def __init__(
        self,
        normal: NvlinkExchange,
        low_latency: NvlinkExchange | None,
        on_device: bool,
        paths: PathBytes,
    ):
        if on_device and normal.layout.fp8 and normal.dtype != torch.bfloat16:
            raise ConfigError(f"FP8 rows come home in bfloat16, not {normal.dtype}")
        self.per_expert, self.on_device = normal.layout.per_expert, on_device
        self.max_tokens = normal.layout.max_tokens
        self.exchange, self.low_latency, self._paths = normal, low_latency, paths
        self._normal = _Lane(normal)
        self._low_latency = None if low_latency is None else _Lane(low_latency)

    @property
    def nbytes(self) -> int:
        """Of symmetric memory on each rank."""
        low = 0 if self.low_latency is None else self.low_latency.layout.nbytes
        return self.exchange.layout.nbytes + low

    @contextmanager
    def limited(self, programs: int) -> Iterator[None]:
        """Kernels launched meanwhile have at most so many programs; the same on all ranks."""
        lanes = [lane for lane in (self._normal, self._low_latency) if lane is not None]
        before = [lane.exchange.programs for lane in lanes]
        try:
            for lane in lanes:
                lane.exchange.programs = min(programs, lane.exchange.programs)
            yield
        finally:
            for lane, most in zip(lanes, before, strict=True):
                lane.exchange.programs = most

    def dispatch_begin(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> _Dispatch:
        """
        Raises:
            CapacityError, RankLost: see `NvlinkExchange.dispatch_send`.
        """
        sent = self._take(x_TH, routing, most_tokens)
        sent.lane.exchange.dispatch_send(sent.at, *sent.tensors)
        return sent

    def dispatch_end(self, pending: _Dispatch) -> tuple[Received, NvlinkTicket]:
        exchange, at = pending.lane.exchange, pending.at
        if self.on_device and exchange.layout.low_latency:
            x_SCH, scales_SCG = _room(exchange)
            return self._masked(pending, exchange.dispatch_masked(at, x_SCH, scales_SCG))
        return self._came(pending, exchange.dispatch_rows(at))

    def dispatch(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Received, NvlinkTicket]:
        """Raises: as `dispatch_begin`."""
        sent = self._take(x_TH, routing, most_tokens)
        exchange = sent.lane.exchange
        if self.on_device and exchange.layout.low_latency:
            masked = exchange.dispatch_masked_fused(sent.at, *sent.tensors, *_room(exchange))
            return self._masked(sent, masked)
        return self._came(sent, exchange.dispatch_rows_fused(sent.at, *sent.tensors))

    def combine_begin(self, y: Tensor, ticket: NvlinkTicket) -> tuple[_Dispatch, Tensor | None]:
        """y: of `Rows` y_NH or y_NKH, of `Grouped` y_PH or, reduced, y_NH, of `Masked` y_SCH."""
        sent, y = ticket.sent, y.to(ticket.sent.lane.exchange.dtype).contiguous()
        exchange, at = sent.lane.exchange, sent.at
        if ticket.masked is not None:
            exchange.combine_masked(at, y, ticket.masked)
        elif by_place(y, ticket):
            assert ticket.arrived is not None and ticket.segments is not None
            exchange.combine_segments(at, y, ticket.arrived, ticket.segments)
        else:
            assert ticket.arrived is not None
            exchange.combine_rows(at, y, ticket.arrived)
            return sent, y
        return sent, None

    def combine_end(self, pending: tuple[_Dispatch, Tensor | None]) -> Tensor:
        sent, y = pending
        out_TH = sent.lane.exchange.combine_home(sent.at, *sent.tensors[1:], y)
        return self._ended(sent, out_TH)

    def combine(self, y: Tensor, ticket: NvlinkTicket) -> Tensor:
        sent, y = ticket.sent, y.to(ticket.sent.lane.exchange.dtype).contiguous()
        exchange, at, routed = sent.lane.exchange, sent.at, sent.tensors[1:]
        if ticket.masked is not None:
            out_TH = exchange.combine_masked_fused(at, y, ticket.masked, *routed)
        elif by_place(y, ticket):
            assert ticket.arrived is not None and ticket.segments is not None
            out_TH = exchange.combine_segments_fused(
                at, y, ticket.arrived, ticket.segments, *routed
            )
        else:
            assert ticket.arrived is not None
            out_TH = exchange.combine_rows_fused(at, y, ticket.arrived, *routed)
        return self._ended(sent, out_TH)

    def _take(self, x_TH: Tensor, routing: Routing, most_tokens: int | None) -> _Dispatch:
        most = self.max_tokens if most_tokens is None else most_tokens
        lane, low = self._normal, self._low_latency
        if low is not None and most <= low.exchange.layout.max_tokens:
            lane = low
        at = lane.take()
        slots_TK, weights_TK = routing.slots_TK.contiguous(), routing.weights_TK.float()
        return _Dispatch(lane, at, (x_TH.contiguous(), slots_TK, weights_TK.contiguous()), most)

    def _came(self, sent: _Dispatch, arrived: Arrived) -> tuple[Received, NvlinkTicket]:
        exchange = sent.lane.exchange
        self._check_host(exchange)
        if not self.on_device:
            x_NH = arrived.rows
            if arrived.scales is not None:
                x_NH = dequantise_blocks_torch(x_NH, arrived.scales, exchange.dtype)
            rows = Rows(x_NH, arrived.slots_NK, arrived.weights_NK)
            return rows, NvlinkTicket(sent, arrived)
        segments = exchange.place(sent.at, arrived, SEGMENT_ALIGNMENT)
        grouped = Grouped(
            arrived.rows,
            arrived.scales,
            arrived.weights_NK,
            segments.offsets,
            segments.rows,
            segments.places_NK,
            arrived.counts_S,
        )
        return grouped, NvlinkTicket(sent, arrived, segments)

    def _masked(self, sent: _Dispatch, rows: MaskedRows) -> tuple[Masked, NvlinkTicket]:
        exchange = sent.lane.exchange
        self._check_host(exchange)
        # R * T tokens go to K of R * S slots each.
        expected = -(-sent.most_tokens * exchange.layout.top_k // exchange.slots)
        received = Masked(rows.x, rows.scales, rows.counts_S, expected)
        return received, NvlinkTicket(sent, masked=rows)

    def _ended(self, sent: _Dispatch, out_TH: Tensor) -> Tensor:
        self._check_host(sent.lane.exchange)
        sent.lane.in_flight[sent.at] = False
        return out_TH

    def bytes_sent(self) -> dict[str, int]:
        for lane in (self._normal, self._low_latency):
            if lane is None:
                continue
            layout, rows = lane.exchange.layout, lane.exchange.rows_sent()
            told = lane.told or [[0] * layout.ranks] * 2
            sizes = (layout.row_bytes, layout.hidden * layout.itemsize)
            for now, before, size in zip(rows, told, sizes, strict=True):
                self._paths.add([n - b for n, b in zip(now, before, strict=True)], size)
            lane.told = rows
        return self._paths.totals()

    def check(self) -> None:
        """Raises: as `NvlinkExchange.check`."""
        for lane in (self._normal, self._low_latency):
            if lane is not None:
                lane.exchange.check()

    def close(self) -> None:
        """The memory ends with its last mapping."""

    def _check_host(self, exchange: NvlinkExchange) -> None:
        if exchange.device.type == "cpu":  # kernels have ended, so this costs no waiting
            exchange.check()


def by_place(y: Tensor, ticket: NvlinkTicket) -> bool:
    """Whether the experts' rows lie in the order of the segments; else row by row of the staging.

    Raises:
        CrossdockError: neither.
    """
    places = 0 if ticket.segments is None else len(ticket.segments.rows)
    cells = ticket.sent.lane.exchange.layout.cells
    if len(y) not in (places, cells):
        raise CrossdockError(
            f"combine got {len(y)} rows; expected {places} places or {cells} rows of the staging"
        )
    return len(y) == places


def _room(exchange: NvlinkExchange) -> tuple[Tensor, Tensor | None]:
    """Where masked rows and their scales go: [S, C, H], [S, C, H / 128] or None."""
    layout = exchange.layout
    shape = (exchange.slots, layout.cells, layout.hidden)
    wire = torch.float8_e4m3fn if layout.fp8 else exchange.dtype
    x_SCH = torch.empty(shape, dtype=wire, device=exchange.device)
    if not layout.fp8:
        return x_SCH, None
    return x_SCH, torch.empty(*shape[:2], layout.hidden // 128, device=exchange.device)


def build_nvlink(
    world: World,
    layout: NvlinkLayout,
    slots_per_rank: int,
    dtype: torch.dtype,
    paths: PathBytes,
    low_latency: NvlinkLayout | None = None,
    on_device: bool = False,
) -> NvlinkTransport:
    """Collective.

    Raises:
        ConfigError: CPU ranks without the interpreter, or a world without what this needs.
        CapacityError: the symmetric buffers do not fit.
    """
    start = ShmLayout(world.size).nbytes
    exchanges = []
    for each in (layout, low_latency):
        if each is None:
            continue
        buffer = _buffer(world, each, start)
        start += world.size * each.nbytes
        deadline = world.waiter.deadline_s
        exchanges.append(NvlinkExchange(world.rank, each, buffer, slots_per_rank, dtype, deadline))
    low = exchanges[1] if low_latency is not None else None
    return NvlinkTransport(exchanges[0], low, on_device, paths)


def _buffer(world: World, layout: NvlinkLayout, start: int) -> SymmetricBuffer:
    rank, size = world.rank, world.size

    def barrier() -> None:
        world.lockstep.exchange([layout.nbytes])

    if world.device.type == "cuda":
        if size == 1:
            return _own_buffer(layout.nbytes, world.device)
        if world.store is None:
            raise ConfigError('the world was built without a store; build it with "nvlink"')
        return allocate_cuda(world.store, layout.nbytes, rank, size, world.device, barrier)
    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            'transport "nvlink" serves CUDA ranks; on CPUs it runs only in Triton\'s interpreter, '
            "for tests (TRITON_INTERPRET=1)"
        )
    if world.memory is None:
        raise ConfigError("the world was built without shared memory")
    return allocate_host(world.memory, start, layout.nbytes, rank, size, barrier)


def _own_buffer(nbytes: int, device: torch.device) -> SymmetricBuffer:
    """Of a lone rank, which has nobody to share it with."""
    free, _ = torch.cuda.mem_get_info(device)
    if nbytes > free:
        raise CapacityError(
            f"dispatch buffers need {nbytes / 2**20:.0f} MiB of {device}, {free / 2**20:.0f} MiB "
            "are free; lower max_num_batched_tokens"
        )
    local = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    table = torch.tensor([local.data_ptr()], dtype=torch.int64, device=device)
    return SymmetricBuffer(local, table, None)
