"""The transport over the exchange, rows left where they arrived."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.exchange import Arrived, NvlinkExchange
from crossdock.comm.nvlink.layout import SETS, NvlinkLayout
from crossdock.comm.paths import PathBytes
from crossdock.comm.shared import ShmLayout
from crossdock.comm.symmetric import SymmetricBuffer, allocate_cuda, allocate_host
from crossdock.comm.world import World
from crossdock.core import ConfigError, CrossdockError, Received, Routing
from crossdock.kernels.rounding import dequantise_blocks_torch


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """`x_TH` and `routing` are read while rows are on the way and must live as long."""

    at: int
    x_TH: Tensor
    routing: Routing


@dataclass(frozen=True, eq=False)
class NvlinkTicket:
    sent: _Dispatch
    arrived: Arrived


class NvlinkTransport:
    """No host synchronisation; `Received` has a row for every cell of the staging, N = R * T of the
    layout. Lost ranks are told at the next call after the device noticed."""

    def __init__(self, exchange: NvlinkExchange, paths: PathBytes):
        self.per_expert = exchange.layout.per_expert
        self.exchange, self._paths = exchange, paths
        self._next = 0
        self._in_flight = [False] * SETS
        self._told = [[0] * exchange.layout.ranks] * 2

    def dispatch_begin(self, x_TH: Tensor, routing: Routing) -> _Dispatch:
        """
        Raises:
            CapacityError, RankLost: see `NvlinkExchange.dispatch_send`.
        """
        at = self._next
        if self._in_flight[at]:
            raise CrossdockError(f"{SETS} exchanges are in flight; end a combine first")
        x_TH = x_TH.contiguous()
        routing = Routing(routing.slots_TK.contiguous(), routing.weights_TK.float().contiguous())
        self.exchange.dispatch_send(at, x_TH, routing.slots_TK, routing.weights_TK)
        self._next = (at + 1) % SETS
        self._in_flight[at] = True
        return _Dispatch(at, x_TH, routing)

    def dispatch_end(self, pending: _Dispatch) -> tuple[Received, NvlinkTicket]:
        exchange = self.exchange
        arrived = exchange.dispatch_rows(pending.at)
        self._check_host()
        x_NH = arrived.rows
        if arrived.scales is not None:
            x_NH = dequantise_blocks_torch(x_NH, arrived.scales, exchange.dtype)
        received = Received("rows", x_NH, arrived.slots_NK, arrived.weights_NK)
        return received, NvlinkTicket(pending, arrived)

    def combine_begin(self, y: Tensor, ticket: NvlinkTicket) -> tuple[_Dispatch, Tensor]:
        y = y.to(self.exchange.dtype).contiguous()
        self.exchange.combine_rows(ticket.sent.at, y, ticket.arrived)
        return ticket.sent, y

    def combine_end(self, pending: tuple[_Dispatch, Tensor]) -> Tensor:
        sent, y = pending
        routing = sent.routing
        out = self.exchange.combine_home(sent.at, routing.slots_TK, routing.weights_TK, y)
        self._check_host()
        self._in_flight[sent.at] = False
        return out

    def bytes_sent(self) -> dict[str, int]:
        layout, rows = self.exchange.layout, self.exchange.rows_sent()
        sizes = (layout.row_bytes, layout.hidden * layout.itemsize)
        for now, before, size in zip(rows, self._told, sizes, strict=True):
            self._paths.add([n - b for n, b in zip(now, before, strict=True)], size)
        self._told = rows
        return self._paths.totals()

    def close(self) -> None:
        """The memory ends with its last mapping."""

    def _check_host(self) -> None:
        if self.exchange.device.type == "cpu":  # kernels have ended, so this costs no waiting
            self.exchange.check()


def build_nvlink(
    world: World, layout: NvlinkLayout, slots_per_rank: int, dtype: torch.dtype, paths: PathBytes
) -> NvlinkTransport:
    """Collective.

    Raises:
        ConfigError: CPU ranks without the interpreter, or a world without what this needs.
        CapacityError: the symmetric buffers do not fit.
    """
    rank, size = world.rank, world.size

    def barrier() -> None:
        world.lockstep.exchange([layout.nbytes])

    if world.device.type == "cuda":
        if world.store is None:
            raise ConfigError('the world was built without a store; build it with "nvlink"')
        buffer = allocate_cuda(world.store, layout.nbytes, rank, size, world.device, barrier)
    else:
        buffer = _host_buffer(world, layout, barrier)
    exchange = NvlinkExchange(rank, layout, buffer, slots_per_rank, dtype, world.waiter.deadline_s)
    return NvlinkTransport(exchange, paths)


def _host_buffer(
    world: World, layout: NvlinkLayout, barrier: Callable[[], None]
) -> SymmetricBuffer:
    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            'transport "nvlink" serves CUDA ranks; on CPUs it runs only in Triton\'s interpreter, '
            "for tests (TRITON_INTERPRET=1)"
        )
    if world.memory is None:
        raise ConfigError("the world was built without shared memory")
    start = ShmLayout(world.size).nbytes
    return allocate_host(world.memory, start, layout.nbytes, world.rank, world.size, barrier)
