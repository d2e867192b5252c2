"""A rank's place among the others: made once per process, passed to whoever needs it."""

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from crossdock.comm.board import Board
from crossdock.comm.collective import CollectiveTransport
from crossdock.comm.local import LocalTransport
from crossdock.comm.lockstep import CollectiveLockstep, LocalLockstep, ShmLockstep
from crossdock.comm.paths import PathBytes
from crossdock.comm.shared import SharedMemory, ShmLayout, has_total_store_order
from crossdock.comm.shm import ShmTransport
from crossdock.comm.waiting import Waiter
from crossdock.core import ConfigError, Lockstep, Member, Topology, Transport
from crossdock.core.staging import LOW_LATENCY_TOKENS
from crossdock.metrics import Recorder

_SPIN_S, _SHARED_SPIN_S = 1e-3, 200e-6
_START_S = 300.0
"""Ranks that share few cores start long after each other, whatever the deadline of a step is."""

SHM = "shm"
"""Key of the shared memory's descriptor in `fds`."""
COUNTS = "counts"
"""The same, of the memory through which ranks exchange counts within a step."""
GROUP = "group"
"""The same, of the memory through which the ranks of an attention group exchange tokens."""


@dataclass(frozen=True, eq=False)
class World:
    """`group`: what the collective transport runs on, None where nothing needs it. `memory`: shared
    with the other ranks of this host, None where nothing is."""

    rank: int
    size: int
    device: torch.device
    topology: Topology
    board: Board
    lockstep: Lockstep
    waiter: Waiter
    group: Any = None
    memory: SharedMemory | None = None
    store: Any = None
    """Where CUDA ranks of the nvlink transport meet; None where nothing needs it."""
    counts: SharedMemory | None = None
    """For exchanges of counts; None where there are none."""
    tp: int = 1
    """Ranks of an attention group; what they exchange through, where they are several, is either
    `tp_group`, a process group of theirs, or `tp_memory`, shared by all ranks."""
    tp_group: Any = None
    tp_memory: SharedMemory | None = None


def resolve_device(device: str, rank: int, size: int) -> torch.device:
    """
    Raises:
        ConfigError: CUDA was asked for and is not there, or has too few devices.
    """
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cpu" or (device == "auto" and not count):
        return torch.device("cpu")
    if count < size:
        need = (
            "1 rank needs 1 CUDA device" if size == 1 else f"{size} ranks need {size} CUDA devices"
        )
        remedy = "lower ranks or " if count else ""
        raise ConfigError(f'{need}, {count} found; {remedy}set device = "cpu"')
    return torch.device("cuda", rank)


def resolve_transport(choice: str, size: int, device_type: str, nvlink: bool = False) -> str:
    """auto: shm for CPU ranks, nvlink for CUDA ranks that it serves (`nvlink`), otherwise local for
    one rank and collective for more."""
    if choice == "local" and size > 1:
        raise ConfigError(f"transport 'local' serves one rank, not {size}")
    if choice == "shm" and device_type != "cpu":
        raise ConfigError(f'transport "shm" serves CPU ranks, not {device_type}; use "collective"')
    if choice == "nvlink" and size > 1 and device_type == "cuda" and not nvlink_reaches(size):
        raise ConfigError(
            'transport "nvlink" needs GPUs that read each other\'s memory, these do not; '
            'use "collective"'
        )
    if choice != "auto":
        return choice
    if device_type == "cuda" and nvlink:
        return "nvlink"
    if size == 1:
        return "local"
    return "shm" if device_type == "cpu" else "collective"


def nvlink_reaches(size: int) -> bool:
    """Whether each of the first `size` CUDA devices can read the memory of all others."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def build_world(
    rank: int,
    size: int,
    device: str,
    transport: str,
    fds: Mapping[str, int],
    rendezvous: str,
    deadline_s: float,
    tp: int = 1,
) -> World:
    """Joins the other ranks; called once in each rank process, by all of them.

    Args:
        device: "auto", "cpu" or "cuda" (rank r takes cuda:r).
        fds: `{"shm": descriptor}` of a `SharedMemory` of `shm_bytes(...)` or more; without it
            the ranks talk through torch.distributed alone.
        rendezvous: a file path, the same on all ranks; files with this name and a suffix must
            not be there yet.
        tp: ranks of an attention group, those of group g from rank g * tp on.
    """
    place = resolve_device(device, rank, size)
    kind = resolve_transport(transport, size, place.type)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    memory = SharedMemory.attach(fds[SHM]) if SHM in fds else None
    board = Board(rank, size, memory)
    board.enter("start")
    board.beat()
    alone = len(os.sched_getaffinity(0)) >= size
    waiter = Waiter(board, deadline_s, spin_s=_SPIN_S if alone else _SHARED_SPIN_S)
    shared_flags = memory is not None and has_total_store_order()
    tp_memory = SharedMemory.attach(fds[GROUP]) if GROUP in fds else None
    by_process_group = tp > 1 and (place.type == "cuda" or tp_memory is None)
    if memory is not None and (kind == "collective" or by_process_group or not shared_flags):
        _meet(board)
    lockstep: Lockstep = LocalLockstep()
    if size > 1 and memory is not None and shared_flags:
        lockstep = ShmLockstep(rank, size, memory, waiter)
    elif size > 1:
        control = _gloo(_store(rendezvous, "control", size), rank, size, deadline_s)
        lockstep = CollectiveLockstep(control, size, waiter)
    make = _nccl if place.type == "cuda" else _gloo
    group = tp_group = None
    if kind == "collective" and size > 1:
        group = make(_store(rendezvous, "data", size), rank, size, deadline_s)
    if by_process_group:
        name = f"tp{rank // tp}"
        tp_group = make(_store(rendezvous, name, tp), rank % tp, tp, deadline_s)
    meets = kind == "nvlink" and size > 1 and place.type == "cuda"
    store = _store(rendezvous, "symmetric", size) if meets else None
    node = socket.gethostname()
    members = tuple(
        Member(r, node, f"cuda:{r}" if place.type == "cuda" else "cpu") for r in range(size)
    )
    counts = SharedMemory.attach(fds[COUNTS]) if COUNTS in fds else None
    topology = Topology(0, members)
    return World(
        rank, size, place, topology, board, lockstep, waiter, group, memory, store, counts,
        tp, tp_group, tp_memory,
    )  # fmt: skip


def build_transport(
    kind: str,
    world: World,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    slots_per_rank: int,
    dtype: torch.dtype,
    per_expert: bool,
    recorder: Recorder,
    on_device: bool = False,
    fp8: bool = False,
    low_latency_tokens: int = LOW_LATENCY_TOKENS,
    dispatch_mode: str = "auto",
) -> Transport:
    """
    Args:
        kind: "auto", "local", "collective", "shm" or "nvlink"; as given to `build_world`.
        max_tokens: most tokens of a rank that travel at once.
        on_device: nvlink alone: rows whose number only the device knows, see `Transport`.
        fp8: nvlink alone: rows travel to experts in FP8.
        low_latency_tokens: nvlink alone: steps in which no rank has more travel with low latency.
        dispatch_mode: nvlink alone: "normal" or "low_latency" for all steps.
    """
    kind = resolve_transport(kind, world.size, world.device.type)
    if world.size == 1 and kind != "nvlink":  # the others do the same, more slowly
        return LocalTransport(per_expert)
    paths = PathBytes(world.rank, world.topology)
    if kind == "collective":
        if world.group is None:
            raise ConfigError("the world was built without a process group for this transport")
        return CollectiveTransport(
            world.group, world.rank, world.size, slots_per_rank, per_expert, paths, world.waiter,
            recorder,
        )  # fmt: skip
    if kind == "nvlink":
        # Imports triton.
        from crossdock.comm.nvlink import build_nvlink, nvlink_layouts

        normal, low = nvlink_layouts(
            world.size, max_tokens, hidden, top_k, dtype.itemsize, fp8, per_expert,
            low_latency_tokens, dispatch_mode,
        )  # fmt: skip
        return build_nvlink(world, normal, slots_per_rank, dtype, paths, low, on_device)
    layout = ShmLayout(world.size, max_tokens, hidden, top_k, dtype.itemsize, per_expert)
    if world.memory is None:
        raise ConfigError(
            f"the shm transport needs {layout.nbytes} bytes of shared memory, "
            'the world was built without; set transport = "collective"'
        )
    return ShmTransport(
        world.rank, layout, world.memory, slots_per_rank, dtype, paths, world.waiter, recorder
    )


def _meet(board: Board) -> None:
    """Waits until every rank has started. Process groups would wait for them too, but with the
    interpreter locked: no heartbeat, and no end when the gateway is gone.

    Raises:
        RankLost: one did not.
    """

    def missing() -> list[int]:
        return [r for r in range(board.size) if board.heartbeat_age(r) == float("inf")]

    def all_here() -> bool:
        board.beat()  # the thread that does so elsewhere starts once the world is built
        return not missing()

    Waiter(board, _START_S).wait(all_here, missing, "the start")


def await_start(world: World) -> None:
    """Waits, with the board at another stage than "start", until all ranks do, which may be long
    after each other. Where the board is not shared the next exchange has to."""
    board = world.board
    if not board.shared:
        return

    def missing() -> list[int]:
        return [r for r in range(board.size) if board.where(r)[0] == "start"]

    Waiter(board, math.inf).wait(lambda: not missing(), missing, "the start")


def _store(rendezvous: str, name: str, size: int) -> Any:
    return dist.FileStore(f"{rendezvous}.{name}", size)


def _gloo(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    # A group object of our own, not torch's process-wide registry. Loopback by name, since host
    # names often do not resolve.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=deadline_s)
    options._devices = [gloo.create_device(interface="lo")]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
