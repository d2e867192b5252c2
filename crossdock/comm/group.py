"""What the ranks of one attention group exchange within a step: shares of tokens, and sums.

CPU ranks do it through shared memory, others through a process group.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from crossdock.comm.lockstep import broken
from crossdock.comm.shared import SETS, SharedMemory, require_total_store_order
from crossdock.comm.waiting import Waiter
from crossdock.comm.world import World
from crossdock.core import CapacityError, ConfigError, Group, share_of
from crossdock.metrics import Recorder

_LINE, _ALIGN = 64, 4096


def group_bytes(ranks: int, nbytes: int) -> int:
    """Of the memory that all CPU ranks share for it. `nbytes`: the largest tensor of an exchange;
    `tensor_bytes` tells."""
    return SETS * ranks * (_LINE + _aligned(nbytes))


def tensor_bytes(tokens: int, hidden: int, dtype_bytes: int) -> int:
    """Of the largest tensor that a group exchanges: hidden states, or token ids of int64."""
    return tokens * max(hidden * dtype_bytes, 8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class ShmGroup:
    """`core.Group` of CPU ranks of one host. In each exchange a rank writes into a place of its own
    what others need, then the number of the exchange; they read it there. Sums are in rank order,
    in fp32.

    Two sets of places suffice: whoever writes in exchange n has seen all flags of n - 1, which its
    peers raised only after they had read n - 2, whose set n overwrites.

    `first`: the group's first rank of `world`; `nbytes`: the largest tensor.
    """

    def __init__(
        self, world: World, first: int, size: int, nbytes: int, memory: SharedMemory,
        recorder: Recorder,
    ):  # fmt: skip
        require_total_store_order()
        if group_bytes(world.size, nbytes) > memory.nbytes:
            raise CapacityError(
                f"attention groups of {world.size} ranks need {group_bytes(world.size, nbytes)} "
                f"bytes of shared memory, {memory.nbytes} were created; group_bytes() tells"
            )
        self.size, self.rank = size, world.rank - first
        self._first, self._waiter, self._recorder = first, world.waiter, recorder
        self._flags = memory.words(0, SETS * world.size * _LINE // 8)
        self._count, self._nbytes, self._ranks = 0, nbytes, world.size
        places = memory.array(
            SETS * world.size * _LINE, (SETS, world.size, _aligned(nbytes)), np.dtype(np.uint8)
        )
        self._places = [[torch.from_numpy(places[s, first + r]) for r in range(size)]
                        for s in range(SETS)]  # fmt: skip

    def all_gather(self, x_tH: Tensor, tokens: int) -> Tensor:
        places = self._begin()
        if x_tH.numel():
            _view(places[self.rank], x_tH.shape, x_tH.dtype).copy_(x_tH)
        self._end("gather")
        out_TH = x_tH.new_empty(tokens, *x_tH.shape[1:])
        for rank, place in enumerate(places):
            share = share_of(tokens, self.size, rank)
            to = out_TH[share]
            if to.numel():
                to.copy_(x_tH if rank == self.rank else _view(place, to.shape, to.dtype))
        return out_TH

    def reduce_scatter(self, x_TH: Tensor) -> Tensor:
        own = share_of(x_TH.shape[0], self.size, self.rank)
        places = self._begin(x_TH.nbytes)
        mine_TH = _view(places[self.rank], x_TH.shape, x_TH.dtype)
        for others in (slice(0, own.start), slice(own.stop, None)):
            mine_TH[others].copy_(x_TH[others])
        self._end("sum")
        parts = [
            x_TH[own] if rank == self.rank else _view(place, x_TH.shape, x_TH.dtype)[own]
            for rank, place in enumerate(places)
        ]
        total_tH = parts[0].float() + parts[1]
        for part_tH in parts[2:]:
            total_tH += part_tH
        return total_tH.to(x_TH.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        places = self._begin(x.nbytes)
        there = _view(places[0], x.shape, x.dtype)
        if self.rank == 0:
            there.copy_(x)
        self._end("broadcast")
        return x if self.rank == 0 else there.clone()

    def _begin(self, nbytes: int = 0) -> list[Tensor]:
        """The places of this exchange, by rank."""
        if nbytes > self._nbytes:
            raise CapacityError(
                f"{nbytes} bytes in an exchange of an attention group, whose places hold "
                f"{self._nbytes} (max_num_batched_tokens)"
            )
        self._count += 1
        return self._places[self._count % SETS]

    def _end(self, what: str) -> None:
        """Raises the flag and waits for those of the others."""
        flags, count, stride = self._flags, self._count, _LINE // 8
        base = (count % SETS * self._ranks + self._first) * stride
        flag_R = range(base, base + self.size * stride, stride)
        flags[flag_R[self.rank]] = count
        waited = self._waiter.wait(
            lambda: all(flags[word] == count for word in flag_R),
            lambda: [self._first + r for r, word in enumerate(flag_R) if flags[word] != count],
            f"{what} {count} of its attention group",
        )
        self._recorder.observe("wait", waited)


def _view(place: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return place[:nbytes].view(dtype).view(shape)


class CollectiveGroup:
    """`core.Group` over a process group object (NCCL or gloo) that nothing else uses. On a GPU all
    is done on the current stream, and nothing is read on the host, so a CUDA graph can hold it."""

    def __init__(self, group: Any, size: int, rank: int, waiter: Waiter):
        self.size, self.rank = size, rank
        self._group, self._waiter = group, waiter
        self._gather, self._sum = c10d.AllgatherOptions(), c10d.ReduceScatterOptions()
        self._cast = c10d.BroadcastOptions()
        self._sum.reduceOp, self._cast.rootRank = dist.ReduceOp(dist.ReduceOp.SUM), 0
        for options in (self._gather, self._sum, self._cast):
            options.asyncOp = False  # on the current stream, not on one of the process group's own

    def all_gather(self, x_tH: Tensor, tokens: int) -> Tensor:
        each = -(-tokens // self.size)
        x_tH = _filled(x_tH, each)
        out_TH = x_tH.new_empty(each * self.size, *x_tH.shape[1:])
        self._run(self._group._allgather_base, out_TH, x_tH, self._gather)
        return out_TH[:tokens]

    def reduce_scatter(self, x_TH: Tensor) -> Tensor:
        tokens = x_TH.shape[0]
        each, own = -(-tokens // self.size), share_of(tokens, self.size, self.rank)
        x_TH = _filled(x_TH, each * self.size)
        out_tH = x_TH.new_empty(each, *x_TH.shape[1:])
        self._run(self._group._reduce_scatter_base, out_tH, x_TH, self._sum)
        return out_tH[: own.stop - own.start]

    def broadcast(self, x: Tensor) -> Tensor:
        self._run(self._group.broadcast, [x], self._cast)
        return x

    def _run(self, collective: Any, *args: Any) -> None:
        try:
            work = collective(*args)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise broken(error, self._waiter, "an exchange of its attention group") from error


def _filled(x_TH: Tensor, rows: int) -> Tensor:
    """With rows of zeros at its end: all ranks exchange as many."""
    missing = rows - x_TH.shape[0]
    if not missing:
        return x_TH.contiguous()
    return F.pad(x_TH, (*(0, 0) * (x_TH.dim() - 1), 0, missing))


def build_group(world: World, nbytes: int, recorder: Recorder) -> Group:
    """Of `world.tp` ranks, more than one; collective. `nbytes`: the largest tensor of CPU ranks, as
    it was given to `group_bytes`.

    Raises:
        ConfigError: ranks that have no way to exchange.
    """
    first = world.rank - world.rank % world.tp
    if world.tp_group is not None:
        group = CollectiveGroup(world.tp_group, world.tp, world.rank - first, world.waiter)
        # Connects now: what that takes of a GPU's memory must be gone before the KV cache is sized.
        group.broadcast(torch.zeros(1, device=world.device))
        return group
    if world.tp_memory is None:
        raise ConfigError(
            "the world was built without memory for attention groups of several ranks"
        )
    return ShmGroup(world, first, world.tp, nbytes, world.tp_memory, recorder)
