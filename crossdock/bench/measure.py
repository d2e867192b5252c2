"""What this machine reaches: copies, matrix products, links and all-to-alls, as a hardware file.

Works in the default process group, whether `torchrun` made it (over one host or several) or
`measure_here` did. Every rank measures at the same time as the others: they share the memory of a
CPU, and the power and the links of a GPU node.
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossdock.bench.child import Child
from crossdock.bench.report import cpu_name, versions
from crossdock.core import ConfigError, CrossdockError
from crossdock.planner.hardware import hardware_toml

MOST_CPU_RANKS = 4
PING_LIMIT_S = 10.0
_PINGS, _PING_BYTES = 200, 64


@dataclass(frozen=True)
class Sizes:
    """Of what is measured, per kind of device: bytes, and the side of the matrices."""

    copy_bytes: int
    side: int
    exchange_bytes: tuple[int, ...]
    repeats: int


SIZES = {
    "cpu": Sizes(64 << 20, 768, (4 << 10, 64 << 10, 1 << 20), 7),
    "cuda": Sizes(1 << 30, 8192, (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20), 20),
}


@dataclass(frozen=True, eq=False)
class Place:
    """This rank among all. `host`: all ranks, over CPUs: a rank that waits there leaves its GPU
    alone, while in NCCL it would spin there and share it with whoever measures. `node_of`: each
    rank's node; `mates`: the ranks of this one's node."""

    host: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int
    node_of: tuple[int, ...]
    sizes: Sizes

    @property
    def mates(self) -> list[int]:
        return [r for r in range(self.size) if self.node_of[r] == self.node_of[self.rank]]

    @property
    def num_nodes(self) -> int:
        return max(self.node_of) + 1


def measured(path: Path) -> dict[str, Any] | None:
    """Measures, writes the hardware file `path` and tells what it wrote; None on ranks other than
    the first of a `torchrun`.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not path.parent.is_dir():  # before minutes of measuring, not after them
        raise ConfigError(f"--measure {path}: cannot be written: {path.parent} is no directory")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        try:
            rank, values = dist.get_rank(), measure_in_group(device, dist.get_node_local_rank())
        finally:
            dist.destroy_process_group()
        if rank:
            return None
    else:
        values = measure_here(device)
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    installed = ", ".join(f"{package} {number}" for package, number in versions().items())
    text = hardware_toml(
        values, [f"{name}, measured by `crossdock check --measure` at {date}", f"with {installed}"]
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--measure {path}: cannot be written: {error.strerror}") from None
    return {"device": name, "date": date, "path": str(path), "values": values, "text": text}


def measure_here(device: str) -> dict[str, Any]:
    """Starts a rank per GPU, or up to four on the CPU's cores; the values of a hardware file."""
    cores = len(os.sched_getaffinity(0))
    ranks = torch.cuda.device_count() if device == "cuda" else min(MOST_CPU_RANKS, cores)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="crossdock-"))
        name = "crossdock.bench.measure_rank"
        children = [stack.enter_context(Child(name, f"rank {r}", 1)) for r in range(ranks)]
        common = {"ranks": ranks, "device": device, "store": str(Path(directory) / "store")}
        for rank, child in enumerate(children):
            child.send({**common, "rank": rank})
        answers = [child.receive() for child in children]
        return answers[0]


def measure_in_group(device: str, local_rank: int) -> dict[str, Any]:
    """Collective over the default group, the same on all ranks: the values of a hardware file.

    `local_rank`: this rank's number on its host, from 0; a new host begins where it is 0 again.
    """
    kind = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    if kind.type == "cuda":
        torch.cuda.set_device(kind)
    else:
        torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    host = dist.new_group(backend="gloo")
    starts = [local == 0 for local in _gather(host, local_rank)]
    node_of = tuple(sum(starts[: r + 1]) - 1 for r in range(size))
    place = Place(host, kind, rank, size, node_of, SIZES[kind.type])
    copy, products = _copy_rate(place) / 1e9, _products(place)
    every = _gather(place.host, (_memory_mib(place), copy, products))
    values: dict[str, Any] = {
        "memory_mib": min(memory for memory, _, _ in every),
        "memory_gbytes_per_s": statistics.median(rate for _, rate, _ in every),
        "domain_gpus": len(place.mates),
        "matmul_tflop_per_s": {
            dtype: statistics.median(rates[dtype] for _, _, rates in every) for dtype in products
        },
        "inner": _inner(place, copy),
    }
    if place.num_nodes > 1:
        values["outer"] = _outer(place)
    return _gather(place.host, values)[0]


def _gather(host: dist.ProcessGroup, value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=host)
    return found


def _seconds(place: Place, run: Callable[[], object], reps: int = 1) -> float:
    """Median time of `run`, which does its work `reps` times, per time."""
    times = []
    for i in range(place.sizes.repeats + 2):
        if place.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
        else:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
        if i >= 2:
            times.append(seconds / reps)
    return statistics.median(times)


def _memory_mib(place: Place) -> int:
    if place.device.type == "cuda":
        return torch.cuda.mem_get_info(place.device)[1] >> 20
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (total >> 20) // len(place.mates)


def _copy_rate(place: Place) -> float:
    """Bytes read and written per second."""
    source = torch.ones(place.sizes.copy_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    dist.barrier(place.host)
    return 2 * source.numel() / _seconds(place, lambda: target.copy_(source))


def _products(place: Place) -> dict[str, float]:
    """TFLOP/s by dtype, of what this device multiplies."""
    n = place.sizes.side
    found = {}
    on_cpu = place.device.type == "cpu"
    for name in ("float32", "bfloat16") if on_cpu else ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        a, b = (torch.randn(n, n, device=place.device).to(dtype) for _ in range(2))
        dist.barrier(place.host)
        found[name] = 2 * n**3 / _seconds(place, partial(torch.matmul, a, b)) / 1e12
    if place.device.type == "cuda" and torch.cuda.get_device_capability(place.device) >= (8, 9):
        a, b = (torch.randn(n, n, device=place.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=place.device)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        dist.barrier(place.host)
        found["float8_e4m3fn"] = 2 * n**3 / _seconds(place, multiply) / 1e12
    return found


def _inner(place: Place, copy: float) -> dict[str, Any]:
    """The link within a node. `copy`: this rank's copies, GB/s read and written."""
    groups = [
        dist.new_group([r for r in range(place.size) if place.node_of[r] == node])
        for node in range(place.num_nodes)
    ]
    if len(place.mates) == 1:
        # Its only peer is itself: rows go through its own memory.
        rate, latency, name = copy / 2, 0.0, "its own memory (one rank on the node)"
        return {"name": name, "gbytes_per_s_per_direction": rate, "latency_us": latency}
    group = groups[place.node_of[place.rank]]
    exchanges = _all_to_all(place, group, len(place.mates))
    if place.device.type == "cpu":
        name, rate = "shared memory", copy / 2
        latency = _ping_us(place)
    else:
        name, rate, latency = _peer(place, group, exchanges)
    return {
        "name": name,
        "gbytes_per_s_per_direction": rate,
        "latency_us": latency,
        "all_to_all_us": exchanges,
    }


def _peer(
    place: Place, group: dist.ProcessGroup, exchanges: dict[str, float]
) -> tuple[str, float, float]:
    """Name, GB/s per direction and us of the link to the next GPU; where a process cannot reach
    that, of the largest and smallest all-to-all."""
    here, count = place.device.index, torch.cuda.device_count()
    peer = torch.device("cuda", (here + 1) % count)
    reached = count > 1 and torch.cuda.can_device_access_peer(here, peer)
    if not all(_gather(place.host, reached)):
        largest = max(place.sizes.exchange_bytes)
        wire = largest * (len(place.mates) - 1) / len(place.mates)
        times = list(exchanges.values())
        return "all-to-all (no access to the peer's memory)", wire / times[-1] / 1e3, times[0]
    found = None
    if place.rank == place.mates[0]:
        nbytes = max(place.sizes.exchange_bytes)
        found = nbytes / _seconds(place, _copies(place.device, peer, nbytes), reps=8) / 1e9
    rate = _gather(place.host, found)[place.mates[0]]
    return "copy into a peer's memory", rate, _signal_us(place, group)


def _signal_us(place: Place, group: dist.ProcessGroup) -> float:
    """From a signal put into the next GPU's memory to its sight of it, of the first two ranks of a
    node: a kernel each, launched from a graph."""
    import torch.distributed._symmetric_memory as symm_mem

    buffer = symm_mem.empty(_PING_BYTES, dtype=torch.uint8, device=place.device)
    handle = symm_mem.rendezvous(buffer, group.group_name)
    side, took = place.mates.index(place.rank), None
    if side < 2:
        limit_ms = int(PING_LIMIT_S * 1e3)
        steps = [
            partial(handle.put_signal, 1 - side, timeout_ms=limit_ms),
            partial(handle.wait_signal, 1 - side, timeout_ms=limit_ms),
        ]
        if side == 1:
            steps.reverse()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_PINGS):
                for step in steps:
                    step()
        took = _seconds(place, graph.replay, reps=2 * _PINGS) * 1e6
    return _gather(place.host, took)[place.mates[0]]


def _copies(source: torch.device, target: torch.device, nbytes: int) -> Callable[[], object]:
    x = torch.ones(nbytes, dtype=torch.uint8, device=source)
    y = torch.empty(nbytes, dtype=torch.uint8, device=target)

    def run() -> None:
        for _ in range(8):
            y.copy_(x, non_blocking=True)

    return run


def _all_to_all(place: Place, group: dist.ProcessGroup | None, ranks: int) -> dict[str, float]:
    """Microseconds by bytes that each rank sends, itself included; of the slowest rank."""
    found = {}
    for nbytes in place.sizes.exchange_bytes:
        x = torch.ones(nbytes // ranks * ranks, dtype=torch.uint8, device=place.device)
        y = torch.empty_like(x)
        dist.barrier(place.host)
        seconds = _seconds(place, partial(dist.all_to_all_single, y, x, group=group))
        found[f"bytes_{nbytes}"] = seconds * 1e6
    every = _gather(place.host, found)
    return {key: max(times[key] for times in every) for key in found}


def _outer(place: Place) -> dict[str, Any]:
    """The links between nodes: each rank sends to its like on the next node and receives from the
    one before, all at once, then one number on the node after another."""
    large, small = place.sizes.exchange_bytes[-1], _PING_BYTES
    width = len(place.mates)
    together = _ring(place, large, active=True)
    latency = _ring(place, small, active=True)
    alone = [_ring(place, large, active=place.mates.index(place.rank) == i) for i in range(width)]
    every = _gather(place.host, (together, latency, alone))
    rates = [[large / a[i] / 1e9 for _, _, a in every if a[i]] for i in range(width)]
    return {
        "name": "network",
        "gbytes_per_s_per_direction": large / statistics.median(t for t, _, _ in every) / 1e9,
        "latency_us": statistics.median(t for _, t, _ in every) * 1e6,
        "alone_gbytes_per_s_per_direction": [min(r) for r in rates],
        "all_to_all_us": _all_to_all(place, None, place.size),
    }


def _ring(place: Place, nbytes: int, active: bool) -> float:
    """Seconds of one exchange with the neighbouring nodes; 0 for ranks that sit it out.

    Raises:
        CrossdockError: nodes differ in their number of ranks.
    """
    nodes = [
        [r for r in range(place.size) if place.node_of[r] == n] for n in range(place.num_nodes)
    ]
    if len({len(node) for node in nodes}) > 1:
        raise CrossdockError(
            f"nodes have {', '.join(str(len(n)) for n in nodes)} ranks; expected as many on each"
        )
    dist.barrier(place.host)
    if not active:
        return 0.0
    node, index = place.node_of[place.rank], place.mates.index(place.rank)
    after, before = (nodes[(node + step) % len(nodes)][index] for step in (1, -1))
    x = torch.ones(nbytes, dtype=torch.uint8, device=place.device)
    y = torch.empty_like(x)

    def exchange() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
        )
        for work in works:
            work.wait()

    return _seconds(place, exchange)


def _ping_us(place: Place) -> float:
    """From a store to shared memory to the peer's sight of it, of the first two ranks of a node."""
    first, took = place.rank == place.mates[0], None
    with ExitStack() as stack:
        made = None
        if first:
            where = "/dev/shm" if os.path.isdir("/dev/shm") else None
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=where))
            file.truncate(mmap.PAGESIZE)
            made = file.name
        path = _gather(place.host, made)[place.mates[0]]
        if place.rank in place.mates[:2]:
            with open(path, "r+b") as shared, mmap.mmap(shared.fileno(), mmap.PAGESIZE) as memory:
                took = _ping(memory, 0 if first else 1)
        times = _gather(place.host, took)
    return times[place.mates[0]] * 1e6


def _ping(memory: mmap.mmap, side: int) -> float:
    """Seconds one way, half the median round. The sides count up in turn."""
    stamps = []
    for turn in range(side, 2 * _PINGS, 2):
        deadline = time.monotonic() + PING_LIMIT_S
        while memory[0] != turn % 256:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise CrossdockError(f"no answer through shared memory in {PING_LIMIT_S:.0f} s")
        stamps.append(time.perf_counter())
        memory[0] = (turn + 1) % 256
    return statistics.median(after - before for before, after in pairwise(stamps)) / 2
