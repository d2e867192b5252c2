"""Symmetric buffers: the same number of bytes in every rank's memory, all of them addressable from
all ranks by plain loads and stores.

Two providers. CUDA: torch's symmetric memory, over NVLink; its multicast is not used. Host: shared
memory that every rank process maps, so that the same kernels run on CPUs in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.comm.shared import SharedMemory
from crossdock.core import CapacityError


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """local: uint8 [nbytes], this rank's part. table: int64 [R] on the device, where each rank's
    part lies for this process. `owner` keeps the mapping alive."""

    local: Tensor
    table: Tensor
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.local.numel()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = 1
        for n in shape:
            count *= n
        return self.local[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def allocate_host(
    memory: SharedMemory, start: int, nbytes: int, rank: int, size: int, barrier: Callable[[], None]
) -> SymmetricBuffer:
    """Parts of `nbytes` one after another from `start`. Collective; zero-filled when it returns.

    Raises:
        CapacityError: the memory ends before the last part.
    """
    if start + size * nbytes > memory.nbytes:
        raise CapacityError(
            f"{size} ranks need {size * nbytes} bytes of shared memory for symmetric buffers, "
            f"{max(0, memory.nbytes - start)} are there; lower max_num_batched_tokens or ranks"
        )
    whole = memory.array(start, (size, nbytes), np.dtype(np.uint8))
    local = torch.from_numpy(whole[rank])
    base = whole.ctypes.data
    table = torch.tensor([base + r * nbytes for r in range(size)], dtype=torch.int64)
    local.zero_()
    barrier()
    return SymmetricBuffer(local, table, (memory, whole))


def allocate_cuda(
    store: Any, nbytes: int, rank: int, size: int, device: torch.device, barrier: Callable[[], None]
) -> SymmetricBuffer:
    """
    Args:
        store: a torch FileStore that these ranks share and use for nothing else.

    Raises:
        CapacityError: the device has less free memory.
    """
    from torch._C._distributed_c10d import _SymmetricMemory as Memory

    free, _ = torch.cuda.mem_get_info(device)
    if nbytes > free:
        raise CapacityError(
            f"symmetric buffers need {nbytes / 2**20:.0f} MiB of {device}, {free / 2**20:.0f} MiB "
            "are free; lower max_num_batched_tokens"
        )
    name, group = _register(store, rank, size)
    local = Memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    handle = Memory.rendezvous(local, name)
    table = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    local.zero_()
    torch.cuda.synchronize(device)
    barrier()
    return SymmetricBuffer(local, table, (handle, group))


def _register(store: Any, rank: int, size: int) -> tuple[str, Any]:
    """A name under which torch finds these ranks and their store, new for every buffer, and the
    group that must live as long."""
    from torch._C import _distributed_c10d as c10d

    name = f"{store.path}.{store.add(f'buffers of rank {rank}', 1)}"
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
    register: Any = c10d._register_process_group  # its stub wants a name type of its own
    register(name, group)
    return name, group
