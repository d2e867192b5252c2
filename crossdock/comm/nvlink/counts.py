"""Counts that all ranks gather within a step, over symmetric memory, with no word from the host."""

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.exchange import NvlinkExchange
from crossdock.comm.symmetric import SymmetricBuffer, allocate_cuda
from crossdock.comm.world import World
from crossdock.core import CapacityError, ConfigError
from crossdock.core.staging import SETS
from crossdock.kernels.counts import exchange_counts

_ALIGN = 256


def nvlink_counts_bytes(ranks: int, experts: int) -> int:
    """Of symmetric memory on each rank."""
    return SETS * (_aligned(ranks * 8) + ranks * _aligned(experts * 4))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class NvlinkCounts:
    """`comm.Counts` of ranks that also have `exchange`, which tells of those that did not come.

    A CUDA graph can hold it. All exchanges of a rank are on one stream. Two sets suffice: whoever
    writes in exchange n has ended n - 1, for which its peers raised their flags only after they had
    copied n - 2, whose set n overwrites.

    Raises:
        CapacityError: a buffer of fewer than `nvlink_counts_bytes`.
    """

    def __init__(self, exchange: NvlinkExchange, experts: int, buffer: SymmetricBuffer):
        self._exchange, self._experts, self._buffer = exchange, experts, buffer
        self._size = exchange.layout.ranks
        needed = nvlink_counts_bytes(self._size, experts)
        if buffer.nbytes < needed:
            raise CapacityError(
                f"counts of {experts} experts on {self._size} ranks need {needed} bytes of "
                f"symmetric memory, got {buffer.nbytes}"
            )
        self._epochs = torch.zeros(3, dtype=torch.int64, device=exchange.device)
        self._interpret = bool(triton.knobs.runtime.interpret)

    def gather(self, counts_E: Tensor) -> Tensor:
        """int32 [E] of every rank, [R, E]; all ranks call it equally often.

        Raises:
            RankLost: an earlier wait gave up; in the interpreter also this one.
            CrossdockError: counts of another shape or dtype.
        """
        exchange, size, experts = self._exchange, self._size, self._experts
        exchange.check()
        exchange.expect("counts", counts_E, (experts,), torch.int32)
        tokens_RE = counts_E.new_empty(size, experts)
        flags_bytes, row_bytes = _aligned(size * 8), _aligned(experts * 4)
        exchange_counts[(size,)](
            counts_E, tokens_RE, self._buffer.table, self._epochs, size, exchange.rank, experts,
            flags_bytes + size * row_bytes, flags_bytes, row_bytes, *exchange.giving_up,
            E_MAX=triton.next_power_of_2(experts), INTERPRET=self._interpret, num_warps=4,
        )  # fmt: skip
        if self._interpret:
            exchange.check()
        return tokens_RE


def build_nvlink_counts(world: World, exchange: NvlinkExchange, experts: int) -> NvlinkCounts:
    """Of CUDA ranks, more than one; collective.

    Raises:
        ConfigError: a world without a store.
    """
    if world.store is None:
        raise ConfigError('the world was built without a store; build it with "nvlink"')
    nbytes = nvlink_counts_bytes(world.size, experts)

    def barrier() -> None:
        world.lockstep.exchange([nbytes])

    buffer = allocate_cuda(world.store, nbytes, world.rank, world.size, world.device, barrier)
    return NvlinkCounts(exchange, experts, buffer)
