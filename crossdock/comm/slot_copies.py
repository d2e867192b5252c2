"""Copies of what slots hold, on their way between ranks: pushed into the staging of the rank that
will hold them, beside running steps, a few bytes at a time.

Nobody is told of an arrival here: ranks learn through the lockstep that others have sent all, and
compare checksums before they use anything.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from crossdock.comm.symmetric import allocate_cuda
from crossdock.comm.world import World
from crossdock.core import CapacityError, ConfigError

_ALIGN = 64
_CHECK_BYTES = 16


class SlotCopies(Protocol):
    """Staging of `places` copies of `nbytes` on every rank."""

    places: int
    nbytes: int

    def push(self, rank: int, place: int, offset: int, data: Tensor) -> None:
        """uint8 `data` to `offset` of a place of `rank`; `data` stays as it is until `sent`."""
        ...

    def seal(self, rank: int, place: int, pieces: Sequence[Tensor]) -> None:
        """After its last push: the checksum of all of a copy's bytes, piece by piece."""
        ...

    def sent(self) -> bool:
        """Whether everything pushed so far has arrived. Asks, never waits."""
        ...

    def arrived(self, place: int) -> Tensor:
        """uint8 [nbytes] of this rank's staging."""
        ...

    def examine(self, places: Sequence[int]) -> None:
        """Begins to compare these copies' bytes with what was sealed."""
        ...

    def intact(self) -> bool | None:
        """Whether all of those that are examined are what was sealed; None: not known yet. Never
        waits."""
        ...

    def used(self) -> None:
        """Whoever reads this rank's staging has been launched."""
        ...

    def free(self) -> bool:
        """Whether all that has been read, so that others may write there again. Never waits."""
        ...


def _crc(pieces: Sequence[Tensor]) -> int:
    total = 0
    for data in pieces:
        total = zlib.crc32(data.numpy().data, total)
    return total


def stride_of(nbytes: int) -> int:
    """Bytes between places: a copy and its checksum."""
    return -(-(nbytes + _CHECK_BYTES) // _ALIGN) * _ALIGN


class HostCopies:
    """Ranks of one host over shared memory; `area` [R, places * stride] uint8."""

    def __init__(self, rank: int, area: Tensor, nbytes: int):
        self._rank, self.nbytes, self._stride = rank, nbytes, stride_of(nbytes)
        self.places = area.shape[1] // self._stride
        self._area, self._intact = area, True

    def push(self, rank: int, place: int, offset: int, data: Tensor) -> None:
        start = place * self._stride + offset
        self._area[rank, start : start + data.numel()].copy_(data)

    def seal(self, rank: int, place: int, pieces: Sequence[Tensor]) -> None:
        self._sealed(rank, place).fill_(_crc(pieces))

    def sent(self) -> bool:
        return True

    def arrived(self, place: int) -> Tensor:
        start = place * self._stride
        return self._area[self._rank, start : start + self.nbytes]

    def examine(self, places: Sequence[int]) -> None:
        self._intact = all(
            bool((self._sealed(self._rank, place) == _crc([self.arrived(place)])).all())
            for place in places
        )

    def intact(self) -> bool | None:
        return self._intact

    def used(self) -> None:
        """It has been read already."""

    def free(self) -> bool:
        return True

    def _sealed(self, rank: int, place: int) -> Tensor:
        end = (place + 1) * self._stride
        return self._area[rank, end - _CHECK_BYTES : end].view(torch.int64)


class CudaCopies:
    """GPUs of one host: copy engines write into the peers' symmetric memory, on a stream of their
    own, beside whatever the multiprocessors do."""

    def __init__(self, rank: int, parts: Sequence[Tensor], nbytes: int, owner: Any):
        from crossdock.kernels.checksum import checksum  # imports triton

        self._rank, self.nbytes, self._stride = rank, nbytes, stride_of(nbytes)
        self._parts, self._owner, self._checksum = parts, owner, checksum
        self.places = parts[rank].numel() // self._stride
        self._stream = torch.cuda.Stream(parts[rank].device)
        self._sent, self._used, self._examined = (torch.cuda.Event() for _ in range(3))
        self._damaged = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def push(self, rank: int, place: int, offset: int, data: Tensor) -> None:
        start = place * self._stride + offset
        self._write(self._parts[rank][start : start + data.numel()], data)

    def seal(self, rank: int, place: int, pieces: Sequence[Tensor]) -> None:
        end = (place + 1) * self._stride
        with torch.cuda.stream(self._stream):
            total = self._checksum(pieces)
        self._write(self._parts[rank][end - _CHECK_BYTES : end], total.view(torch.uint8))

    def sent(self) -> bool:
        return self._sent.query()

    def arrived(self, place: int) -> Tensor:
        start = place * self._stride
        return self._parts[self._rank][start : start + self.nbytes]

    def examine(self, places: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            damaged = torch.zeros(1, dtype=torch.int64, device=self._parts[self._rank].device)
            for place in places:
                end = (place + 1) * self._stride
                sealed = self._parts[self._rank][end - _CHECK_BYTES : end].view(torch.int64)
                damaged += (sealed != self._checksum([self.arrived(place)])).sum()
            self._damaged.copy_(damaged, non_blocking=True)
            self._examined.record(self._stream)

    def intact(self) -> bool | None:
        return not self._damaged.item() if self._examined.query() else None

    def used(self) -> None:
        self._used.record()

    def free(self) -> bool:
        return self._used.query()

    def _write(self, target: Tensor, data: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(data, non_blocking=True)
            self._sent.record(self._stream)


def build_copies(world: World, places: int, nbytes: int) -> SlotCopies:
    """Collective. CPU ranks use the end of their shared memory; a lone rank has its own.

    Raises:
        CapacityError: that memory is too small.
        ConfigError: CUDA ranks that share no memory.
    """
    rank, size, share = world.rank, world.size, places * stride_of(nbytes)
    if world.device.type == "cuda":
        return _cuda_copies(world, share, nbytes)
    if size == 1:
        # From numpy, since the kernel then gives pages only as they are used.
        return HostCopies(rank, torch.from_numpy(np.zeros((1, share), np.uint8)), nbytes)
    memory, needed = world.memory, host_copies_bytes(size, places, nbytes)
    if memory is None or needed > memory.nbytes:
        there = 0 if memory is None else memory.nbytes
        raise CapacityError(
            f"copies of {places} experts on {size} ranks need {needed} bytes of shared memory, "
            f'{there} are there; set rebalance = "off"'
        )
    shape, start = (size, share), memory.nbytes - needed
    area = torch.from_numpy(memory.array(start, shape, np.dtype(np.uint8)))
    return HostCopies(rank, area, nbytes)


def _cuda_copies(world: World, share: int, nbytes: int) -> CudaCopies:
    if world.size == 1:
        own = torch.zeros(share, dtype=torch.uint8, device=world.device)
        return CudaCopies(0, [own], nbytes, None)
    if world.store is None:
        raise ConfigError('moving experts between GPUs needs transport = "nvlink"')

    def barrier() -> None:
        world.lockstep.exchange([share])

    buffer = allocate_cuda(world.store, share, world.rank, world.size, world.device, barrier)
    handle, _ = buffer.owner
    parts = [handle.get_buffer(r, (share,), torch.uint8) for r in range(world.size)]
    return CudaCopies(world.rank, parts, nbytes, buffer)


def host_copies_bytes(ranks: int, places: int, nbytes: int) -> int:
    """Of shared memory, at its end."""
    return 0 if ranks == 1 else ranks * places * stride_of(nbytes)
