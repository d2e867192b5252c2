"""What ranks say to each other: lockstep, control board, and transports that move rows.

Knows ranks, slots and bytes; not what the rows mean.
"""

from crossdock.comm.apart import build_apart
from crossdock.comm.board import Board
from crossdock.comm.collective import CollectiveTransport
from crossdock.comm.counts import Counts, LocalCounts, ShmCounts, build_counts, counts_bytes
from crossdock.comm.group import CollectiveGroup, ShmGroup, build_group, group_bytes, tensor_bytes
from crossdock.comm.local import LocalTransport
from crossdock.comm.lockstep import CollectiveLockstep, LocalLockstep, ShmLockstep
from crossdock.comm.shared import SharedMemory, free_memory, has_total_store_order, shm_bytes
from crossdock.comm.shm import ShmTransport
from crossdock.comm.slot_copies import SlotCopies, build_copies, host_copies_bytes
from crossdock.comm.world import (
    World,
    await_start,
    build_transport,
    build_world,
    nvlink_reaches,
    resolve_device,
    resolve_transport,
)

__all__ = [
    "Board",
    "CollectiveGroup",
    "CollectiveLockstep",
    "CollectiveTransport",
    "Counts",
    "LocalCounts",
    "LocalLockstep",
    "LocalTransport",
    "SharedMemory",
    "ShmCounts",
    "ShmGroup",
    "ShmLockstep",
    "ShmTransport",
    "SlotCopies",
    "World",
    "await_start",
    "build_apart",
    "build_copies",
    "build_counts",
    "build_group",
    "build_transport",
    "build_world",
    "counts_bytes",
    "free_memory",
    "group_bytes",
    "has_total_store_order",
    "host_copies_bytes",
    "nvlink_reaches",
    "resolve_device",
    "resolve_transport",
    "shm_bytes",
    "tensor_bytes",
]
