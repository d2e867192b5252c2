"""What a benchmark's rank needs of the others: a world, and symmetric buffers."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from crossdock.comm import World, build_world
from crossdock.comm.shared import ShmLayout
from crossdock.comm.symmetric import SymmetricBuffer, allocate_cuda, allocate_host

DEADLINE_S = 30.0


def join(settings: dict[str, Any]) -> World:
    """Settings as `Ranks` sends them; the world has a process group, and a store for CUDA."""
    torch.set_num_threads(1)
    rank, size, rendezvous = (settings[key] for key in ("rank", "ranks", "rendezvous"))
    fds = {"shm": settings["fd"]}
    world = build_world(rank, size, settings["device"], "collective", fds, rendezvous, DEADLINE_S)
    world.board.beat()
    store = dist.FileStore(f"{rendezvous}.symmetric", size) if size > 1 else None
    return replace(world, store=store)


def symmetric_buffer(world: World, nbytes: int) -> SymmetricBuffer:
    """Collective; one at a time where it is host memory, since all begin at the same place."""

    def barrier() -> None:
        world.lockstep.exchange([nbytes])

    if world.device.type == "cpu":
        assert world.memory is not None
        start = ShmLayout(world.size).nbytes
        return allocate_host(world.memory, start, nbytes, world.rank, world.size, barrier)
    if world.size == 1:
        local = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
        table = torch.tensor([local.data_ptr()], dtype=torch.int64, device=world.device)
        return SymmetricBuffer(local, table, None)
    return allocate_cuda(world.store, nbytes, world.rank, world.size, world.device, barrier)
