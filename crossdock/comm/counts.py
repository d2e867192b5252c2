"""Counts that all ranks gather within a step. Knows not what is counted."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from crossdock.comm.lockstep import broken
from crossdock.comm.shared import SETS, SharedMemory, require_total_store_order
from crossdock.comm.waiting import Waiter
from crossdock.comm.world import COUNTS, World
from crossdock.core import CapacityError, ConfigError, Transport
from crossdock.metrics import Recorder

_LINE = 64


class Counts(Protocol):
    def gather(self, counts_E: Tensor) -> Tensor:
        """int64 [E] of every rank, on a GPU int32, to [R, E]; all ranks call it equally often.

        Raises:
            RankLost: a rank did not come within the deadline.
        """
        ...


class LocalCounts:
    """Of one rank."""

    def gather(self, counts_E: Tensor) -> Tensor:
        return counts_E.unsqueeze(0)


class ShmCounts:
    """Through shared memory of its own: a rank writes its counts, then the number of the exchange.
    Two sets suffice, as in `lockstep`."""

    def __init__(
        self, rank: int, size: int, experts: int, memory: SharedMemory, waiter: Waiter,
        recorder: Recorder,
    ):  # fmt: skip
        require_total_store_order()
        if counts_bytes(size, experts) > memory.nbytes:
            raise CapacityError(
                f"counts of {experts} experts on {size} ranks need {counts_bytes(size, experts)} "
                f"bytes of shared memory, {memory.nbytes} were created; counts_bytes() tells"
            )
        self._rank, self._size, self._waiter, self._recorder = rank, size, waiter, recorder
        words = SETS * size * _LINE // 8
        self._flags = memory.words(0, words)
        self._rows = memory.array(words * 8, (SETS, size, experts), np.dtype(np.int64))
        self._count = 0

    def gather(self, counts_E: Tensor) -> Tensor:
        self._count += 1
        count, flags, at = self._count, self._flags, self._count % SETS
        stride = _LINE // 8
        flag_R = range(at * self._size * stride, (at + 1) * self._size * stride, stride)
        self._rows[at, self._rank] = counts_E.numpy()
        flags[flag_R[self._rank]] = count
        waited = self._waiter.wait(
            lambda: all(flags[word] == count for word in flag_R),
            lambda: [rank for rank, word in enumerate(flag_R) if flags[word] != count],
            f"exchange {count} of counts",
        )
        self._recorder.observe("wait", waited)
        return torch.from_numpy(self._rows[at].copy())


class GroupCounts:
    """Through a process group, on the device its backend works on."""

    def __init__(self, group: Any, size: int, waiter: Waiter):
        self._group, self._size, self._waiter = group, size, waiter

    def gather(self, counts_E: Tensor) -> Tensor:
        counts_RE = counts_E.new_empty(self._size, counts_E.shape[0])
        try:
            self._group.allgather([list(counts_RE.unbind(0))], [counts_E]).wait()
        except RuntimeError as error:
            raise broken(error, self._waiter, "an exchange of counts") from error
        return counts_RE


def counts_bytes(ranks: int, experts: int) -> int:
    """Of the memory that CPU ranks of the shm transport share for it."""
    return SETS * ranks * (_LINE + experts * 8)


def build_counts(
    world: World, experts: int, recorder: Recorder, transport: Transport | None = None
) -> Counts:
    """Collective. `transport`: beside which CUDA ranks without a process group exchange counts.

    Raises:
        ConfigError: ranks that have no way to exchange counts.
    """
    if world.size == 1:
        return LocalCounts()
    if world.group is not None:
        return GroupCounts(world.group, world.size, world.waiter)
    if world.device.type == "cuda":
        # Imports triton.
        from crossdock.comm.nvlink import NvlinkTransport, build_nvlink_counts

        if not isinstance(transport, NvlinkTransport):
            raise ConfigError(
                'CUDA ranks exchange counts beside transport "nvlink" or "collective", got '
                f"{type(transport).__name__}"
            )
        return build_nvlink_counts(world, transport.exchange, experts)
    if world.counts is None:
        raise ConfigError(
            f'the world was built without "{COUNTS}" memory, which exchanges of counts need'
        )
    return ShmCounts(world.rank, world.size, experts, world.counts, world.waiter, recorder)
