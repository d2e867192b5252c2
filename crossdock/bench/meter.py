"""How a rank measures what all ranks do together.

Before each repetition the GPU's L2 is overwritten and the ranks are aligned; neither is part of a
time. Works take turns, so that what drifts drifts for all of them.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from crossdock.bench.align import Aligner
from crossdock.bench.stats import percentile
from crossdock.comm import World

FLUSH_BYTES = 256 << 20

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Work:
    """`run(i)`: repetition i, launched on the current stream. `graph`: whether it can be captured,
    that is, asks nothing of the host."""

    run: Callable[[int], object]
    graph: bool = True


def work_of(run: Callable[[], object]) -> Work:
    """The same in every repetition."""
    return Work(lambda i: run())


Times = dict[str, list[float]]
"""Microseconds by kind: "eager", "graph"."""


class Meter(Protocol):
    def measure(self, works: Mapping[K, Work], turns: int, reps: int) -> dict[K, Times]:
        """Collective. Eager: an entry per repetition. Graph: per replay of `reps` of them."""
        ...


class HostMeter:
    """Of CPU ranks."""

    def __init__(self, world: World):
        self._world = world

    def measure(self, works: Mapping[K, Work], turns: int, reps: int) -> dict[K, Times]:
        times: dict[K, Times] = {name: {"eager": []} for name in works}
        for _ in range(turns):
            for name, work in works.items():
                for i in range(reps):
                    self._world.lockstep.exchange([i])
                    begin = time.perf_counter()
                    work.run(i)
                    times[name]["eager"].append(1e6 * (time.perf_counter() - begin))
        return times


class CudaMeter:
    """Eager: events around each repetition, so launching from Python counts as far as the GPU waits
    for it. Graph: (a replay of n repetitions - one of n flushes and alignments) / n, which ends
    with the slowest rank since the next alignment waits for it."""

    def __init__(self, world: World):
        self._world = world
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=world.device)
        self._aligner = Aligner(world)
        self._stream = torch.cuda.Stream(world.device)
        self._empty: dict[int, torch.cuda.CUDAGraph] = {}

    def measure(self, works: Mapping[K, Work], turns: int, reps: int) -> dict[K, Times]:
        for work in works.values():  # compiles
            for i in range(2):
                work.run(i)
        torch.cuda.synchronize()
        self._world.lockstep.exchange([0])
        if reps not in self._empty:
            self._empty[reps] = self.capture(lambda i: None, reps)
        empty = self._empty[reps]
        graphs = {n: self.capture(w.run, reps) for n, w in works.items() if w.graph}
        for graph in (empty, *graphs.values()):  # the first replay uploads it
            graph.replay()
        torch.cuda.synchronize()
        times: dict[K, Times] = {name: {"eager": []} for name in works}
        raw: dict[K, list[float]] = {name: [] for name in graphs}
        base: list[float] = []
        for _ in range(turns):
            base.append(self._replay(empty))
            for name, work in works.items():
                times[name]["eager"] += self._eager(work.run, reps)
                if name in graphs:
                    raw[name].append(self._replay(graphs[name]))
        idle = percentile(base, 50)
        for name, spans in raw.items():
            times[name]["graph"] = [(span - idle) / reps for span in spans]
        self._aligner.check()
        return times

    def _prepare(self) -> None:
        self._flush.fill_(1)
        self._aligner()

    def _eager(self, run: Callable[[int], object], reps: int) -> list[float]:
        self._world.lockstep.exchange([0])
        pairs = [(_event(), _event()) for _ in range(reps)]
        for i, (begin, end) in enumerate(pairs):
            self._prepare()
            begin.record()
            run(i)
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]

    def capture(self, run: Callable[[int], object], reps: int) -> torch.cuda.CUDAGraph:
        """Of `reps` repetitions, each flushed and aligned before, and once more at the end."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads, such as NCCL's watchdog, may ask the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            for i in range(reps):
                self._prepare()
                run(i)
            self._prepare()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        self._world.lockstep.exchange([0])
        begin, end = _event(), _event()
        self._prepare()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)


def clock_while(run: Callable[[], object], launches: int) -> float | None:
    """Median clock in MHz of the multiprocessors while `run` is repeated; None where NVML's Python
    package is missing. What slows down under load is bound by power, not by its code."""
    try:
        torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):
        return None
    done = _event()
    for _ in range(launches):
        run()
    done.record()
    seen = []
    while not done.query():
        seen.append(float(torch.cuda.clock_rate()))
        time.sleep(1e-3)
    return percentile(seen[len(seen) // 2 :], 50) if seen else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
