"""Memory shared by the rank processes of one host, and what lies where in it.

Anonymous (`memfd_create`): the launcher creates it and its children inherit the descriptor, so only
they can open it, nothing is left behind after a crash, and the size of /dev/shm does not matter.
"""

import fcntl
import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossdock.core import CapacityError, ConfigError

PAGE = 4096
BOARD_WORDS = 8
"""int64 per rank: one cache line."""
LOCKSTEP_VALUES = 62
"""Most integers a rank may give to one exchange."""
LOCKSTEP_WORDS = LOCKSTEP_VALUES + 2
SETS = 2
"""Buffer sets of lockstep and transport; see shm.py for why two are enough."""
_TOTAL_STORE_ORDER = ("x86_64", "AMD64")


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class ShmLayout:
    """Byte offsets of everything in the shared memory. `max_tokens` 0: the control part alone."""

    ranks: int
    max_tokens: int = 0
    hidden: int = 0
    top_k: int = 0
    dtype_bytes: int = 0
    per_expert: bool = False

    @property
    def lockstep(self) -> int:
        return _pages(self.ranks * BOARD_WORDS * 8)

    @property
    def flags(self) -> int:
        return self.lockstep + _pages(SETS * self.ranks * LOCKSTEP_WORDS * 8)

    @property
    def meta_words(self) -> int:
        """int64 per row that travels: token index, K slots, K float32 weights."""
        return 1 + self.top_k + (self.top_k + 1) // 2

    @property
    def meta(self) -> int:
        return self.flags + _pages(2 * SETS * self.ranks**2 * 8)

    @property
    def rows(self) -> int:
        return self.meta + _pages(SETS * self.ranks**2 * self.max_tokens * self.meta_words * 8)

    @property
    def home(self) -> int:
        row = self.hidden * self.dtype_bytes
        return self.rows + _pages(SETS * self.ranks**2 * self.max_tokens * row)

    @property
    def cells(self) -> int:
        """Rows that can come home to one rank: one per token and rank, or per token and expert."""
        return self.max_tokens * (self.top_k if self.per_expert else self.ranks)

    @property
    def nbytes(self) -> int:
        row = self.hidden * self.dtype_bytes
        return self.home + _pages(SETS * self.ranks * self.cells * row)


def shm_bytes(
    ranks: int,
    max_tokens: int = 0,
    hidden: int = 0,
    top_k: int = 0,
    dtype_bytes: int = 0,
    per_expert: bool = False,
) -> int:
    """Bytes that `ranks` ranks of one host share: board, lockstep and, unless `max_tokens` (tokens
    per rank and step) is 0, the buffers of the shm transport."""
    return ShmLayout(ranks, max_tokens, hidden, top_k, dtype_bytes, per_expert).nbytes


def free_memory() -> int:
    """Bytes this process could still get: MemAvailable, or less where a cgroup sets a limit."""
    return min(_mem_available(), _cgroup_headroom())


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_headroom() -> int:
    free = 1 << 62
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return free
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A container sees its own cgroup as the root, so every level that can be read counts.
        group = root / path.strip("/")
        for level in (group, *group.parents):
            try:
                limit, used = (int((level / name).read_text()) for name in names)
            except (OSError, ValueError):  # not there, or "max"
                continue
            free = min(free, max(0, limit - used))
    return free


def has_total_store_order(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in _TOTAL_STORE_ORDER


def require_total_store_order(machine: str | None = None) -> None:
    """The flags of the shm transport need stores seen in program order; we set no fences.

    Raises:
        ConfigError: on anything but x86-64.
    """
    if not has_total_store_order(machine):
        raise ConfigError(
            "the shm transport needs an x86-64 processor (total store order), "
            f"this is {machine or platform.machine()}; "
            'set transport = "collective"'
        )


class SharedMemory:
    """A mapping of anonymous memory that children get through `pass_fds`. Zero-filled."""

    def __init__(self, fd: int, nbytes: int):
        self.fd, self.nbytes = fd, nbytes
        self._map = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        """
        Raises:
            CapacityError: less memory than `nbytes` is free.
        """
        free = free_memory()
        if nbytes > free:
            raise CapacityError(
                f"the ranks need {nbytes / 2**20:.0f} MiB of shared memory, "
                f"{free / 2**20:.0f} MiB are free; lower max_num_batched_tokens or ranks"
            )
        fd = os.memfd_create("crossdock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # A process that shrank it would kill the others with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int) -> "SharedMemory":
        """Maps what another process created; `fd` can be closed afterwards."""
        return cls(fd, os.fstat(fd).st_size)

    def words(self, offset: int, count: int) -> memoryview:
        """int64; an element is loaded and stored at once, and costs tens of nanoseconds."""
        return memoryview(self._map)[offset : offset + count * 8].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.ndarray(shape, dtype, self._map, offset)

    def close_fd(self) -> None:
        """The mapping lives on; it ends with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
