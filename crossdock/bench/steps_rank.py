"""A rank of `bench steps`: an engine whose steps are launched one by one; started by `python -m`.

Steps run as the engine would run them: in the graph and the overlap mode that all ranks agree on,
launched without waiting for the one before.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from crossdock.bench.child import answer_requests
from crossdock.bench.steps_batch import Batch, plan_of
from crossdock.bench.steps_parts import Interval, by_layer, totals
from crossdock.comm import Board, World, build_world
from crossdock.core import EngineConfig, Plan
from crossdock.engine import Engine, agree, build_engine
from crossdock.engine.overlap import OverlapPolicy, forced
from crossdock.engine.runner import How
from crossdock.metrics import CudaClock, StepTiming
from crossdock.metrics.clock import Clock, HostClock

DEADLINE_S = 120.0
COPY_BYTES = 1 << 30
COPIES, IN_A_ROW = 10, 16


@dataclass(frozen=True, eq=False)
class Rank:
    engine: Engine
    config: EngineConfig
    vocab_size: int

    @property
    def world(self) -> World:
        return self.engine.world

    def plan(self, batch: Batch) -> Plan:
        size, group = self.config.page_size, self.world.rank // self.config.tp
        pages = self.engine.info["kv_tokens"] // size
        return plan_of(batch, size, pages, self.vocab_size, group)


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    config = EngineConfig(**settings["config"])
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    world = build_world(
        settings["rank"], settings["ranks"], config.device, config.transport,
        {"shm": settings["fd"]}, settings["rendezvous"], DEADLINE_S, config.tp,
    )  # fmt: skip
    threading.Thread(target=_beat, args=(world.board,), daemon=True).start()
    engine = build_engine(config, world, lambda done, total: None)
    world.board.enter("idle")
    on_gpu = world.device.type == "cuda"
    facts = {**engine.info, "name": torch.cuda.get_device_name(world.device) if on_gpu else ""}
    return Rank(engine, config, settings["vocab_size"]), facts


def _beat(board: Board) -> None:
    while True:
        board.beat()
        time.sleep(0.5)


def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """`request["what"]` names one of the functions below."""
    what = {"time": _time, "parts": _parts, "memory": _memory, "copy": _copy}[request["what"]]
    return what(rank, request)


def how_of(rank: Rank, plan: Plan, mode: str, eagerly: bool = False) -> How:
    """As `Engine.step` decides where all ranks have a batch of this shape; captures the graph that
    it takes, if that is not there. Collective. `mode`: "auto" for the engine's own policy."""
    engine = rank.engine
    policy: OverlapPolicy = engine.overlap if mode == "auto" else forced(mode)  # type: ignore[arg-type]
    graphs = None if eagerly else engine.runner.graphs
    cut = policy.cut(plan)
    need = 0 if graphs is None else graphs.need(plan)
    row = (1, 0, plan.num_tokens, cut, need)
    agreed = agree([row] * rank.world.size, policy, *(() if graphs is None else (graphs.fit,)))
    if graphs is not None and agreed.graph is not None:
        graphs.capture(agreed.graph, agreed.overlap)
    return How(agreed.most_tokens, agreed.overlap, cut, agreed.graph)


def _time(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """`works[name]`: `{"batches": [...], "mode"}`, launched one after another. `ms[name]`: of each
    turn, the mean of `reps` in a row; works take turns, every other turn backwards."""
    works: dict[str, list[tuple[Plan, How]]] = {}
    for name, work in request["works"].items():
        plans = [rank.plan(Batch(**batch)) for batch in work["batches"]]
        works[name] = [(plan, how_of(rank, plan, work["mode"])) for plan in plans]
    for steps in works.values():  # compiles what is not in a graph
        _seconds(rank, steps, 1)
    ms: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(request["turns"]):
        names = list(works) if turn % 2 == 0 else list(works)[::-1]
        for name in names:
            ms[name].append(1e3 * _seconds(rank, works[name], request["reps"]) / request["reps"])
    rank.engine.transport.check()
    hows = {name: [_describe(how) for _, how in steps] for name, steps in works.items()}
    return {"ms": ms, "how": hows}


def _describe(how: How) -> str:
    where = "eager" if how.graph is None else f"graph of {how.graph.rows}"
    return f"{how.overlap}, {where}"


def _seconds(rank: Rank, steps: list[tuple[Plan, How]], reps: int) -> float:
    """All ranks begin together; of this one. On a GPU the time of the device, which has had one
    more before and so need not wait for the host."""
    runner = rank.engine.runner
    rank.world.lockstep.exchange((0,))
    if rank.world.device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(reps):
            for plan, how in steps:
                runner.run(plan, how)
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for rep in range(reps + 1):
        if rep == 1:
            first.record()
        for plan, how in steps:
            runner.launch(plan, how)
    last.record()
    torch.cuda.synchronize(rank.world.device)
    return first.elapsed_time(last) / 1e3


def _parts(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Of `batch` in `mode`, `turns` times: `parts_ms`, `layers` (see `by_layer`), `experts_bytes`:
    of the experts that got rows."""
    plan = rank.plan(Batch(**request["batch"]))
    how = how_of(rank, plan, request["mode"])
    graphs, recorder = rank.engine.runner.graphs, rank.engine.recorder
    if how.graph is not None:
        assert graphs is not None
        graphs.capture(how.graph, how.overlap, timed=True)
    found: dict[str, list[Any]] = {"parts_ms": [], "layers": [], "experts_bytes": []}
    for turn in range(request["turns"] + 1):
        rows = None if recorder.rows_LS is None else recorder.rows_LS.clone()
        intervals = _timed(rank, plan, how)
        if turn == 0:  # compiles
            continue
        used = 0 if rows is None else int((recorder.rows_LS > rows).sum())
        found["parts_ms"].append({part: 1e3 * s for part, s in totals(intervals).items()})
        found["layers"].append(by_layer(intervals, request["layers"], request["moe_layers"]))
        found["experts_bytes"].append(used * rank.engine.info.get("expert_bytes", 0))
    return {**found, "how": _describe(how)}


def _timed(rank: Rank, plan: Plan, how: How) -> list[Interval]:
    device, runner, graphs = rank.world.device, rank.engine.runner, rank.engine.runner.graphs
    clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
    rank.world.lockstep.exchange((0,))
    base = clock.event()
    base.record()
    if how.graph is not None and graphs is not None:
        runner.launch(plan, how, timed=True)
        timing = graphs.timing(how.graph, how.overlap)
    else:
        timing = StepTiming(rank.engine.recorder, clock=clock)
        with timing.recording():
            launched = runner.launch(plan, how)
            if device.type != "cuda":
                launched.read()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return timing.intervals(base)


def _memory(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """What an eager step of `batch` takes at its peak, by mode, beside what is held anyway, and
    what that is. Of GPUs."""
    device, plan = rank.world.device, rank.plan(Batch(**request["batch"]))
    found: dict[str, int] = {}
    for mode in request["modes"]:
        steps = [(plan, how_of(rank, plan, mode, eagerly=True))]
        _seconds(rank, steps, 1)  # takes what stays
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _seconds(rank, steps, 1)
        found[mode] = torch.cuda.max_memory_allocated(device) - held
    return {
        "peak_bytes": found,
        "held_bytes": torch.cuda.memory_allocated(device),
        "total_bytes": torch.cuda.mem_get_info(device)[1],
    }


def _copy(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of a large copy, read and written, all ranks at once."""
    device = rank.world.device
    nbytes = COPY_BYTES if device.type == "cuda" else 64 << 20
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for turn in range(COPIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            rates.append(IN_A_ROW * 2 * nbytes / (time.perf_counter() - begin))
    return {"bytes_per_s": rates}


def _stop(rank: Rank) -> None:
    os._exit(0)  # communication libraries must not wait for peers that are gone


if __name__ == "__main__":
    answer_requests(start, run, _stop)
