"""`bench plan`: how fast the simulator is, and how its time grows with simulated rank-steps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crossdock.balance import POLICIES
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import load_hardware
from crossdock.planner.layout import Layout
from crossdock.planner.simulate import (
    KVLink,
    Pool,
    PricedSteps,
    Rebalance,
    SimConfig,
    SimResult,
    poisson,
    simulate,
    zipf_loads,
)

MODEL, GPU, FP8 = "deepseek-v3", "h100", "float8_e4m3fn"
ISL, OSL = 256, 64
HOUR_ISL, HOUR_OSL, HOUR_RATE = 2000, 100, 55.0
FULL_TIME_RANKS = 512
"""Fewer ranks are simulated for longer, so that no case is over before it can be timed."""
STAND_FOR = 8
LAYERS = 8
"""MoE layers whose loads are drawn; the others are like them."""


@dataclass(frozen=True)
class PlanBenchOptions:
    """`ranks`: a case each with every rank simulated, and one where each simulated rank stands for
    `STAND_FOR`, as `plan` does it. `rate`: requests per second and rank, of
    256 + 64 tokens; `seconds` of simulated time from 512 ranks on. `hour`: also an hour on 96 GPUs,
    prefill and decode apart."""

    ranks: tuple[int, ...] = (8, 64, 512, 2048)
    rate: float = 4.0
    seconds: float = 6.0
    repeats: int = 3
    hour: bool = False
    target: float | None = None


@dataclass(frozen=True)
class Timed:
    """`cpu_s`: of the one process; `wall_s` depends on what else runs."""

    result: SimResult
    cpu_s: float
    wall_s: float

    @property
    def rank_steps(self) -> int:
        return sum(pool.rank_steps for pool in self.result.pools.values())

    @property
    def tokens_per_rank_step(self) -> float:
        return sum(pool.tokens for pool in self.result.pools.values()) / self.rank_steps


@dataclass(frozen=True)
class PlanBenchRun:
    options: PlanBenchOptions
    turns: dict[tuple[int, int], list[Timed]]
    """By ranks, and how many of them are simulated."""
    hour: Timed | None


def run_plan(
    options: PlanBenchOptions, on_progress: Callable[[str], None] = lambda what: None
) -> PlanBenchRun:
    """The sizes take turns."""
    pairs = [(ranks, ranks) for ranks in options.ranks]
    pairs += [(n, n // STAND_FOR) for n in options.ranks if n % STAND_FOR == 0]
    turns: dict[tuple[int, int], list[Timed]] = {pair: [] for pair in pairs}
    for turn in range(options.repeats):
        for ranks, simulated in pairs:
            on_progress(f"{simulated} of {ranks} ranks, {turn + 1} of {options.repeats}")
            seconds = options.seconds * max(1.0, FULL_TIME_RANKS / ranks)
            config = _together(ranks, simulated, options.rate, seconds, turn)
            turns[ranks, simulated].append(_timed(config))
    hour = None
    if options.hour:
        on_progress("an hour on 96 GPUs")
        hour = _timed(_hour())
    return PlanBenchRun(options, turns, hour)


def _timed(config: SimConfig) -> Timed:
    cpu, wall = time.process_time(), time.perf_counter()
    result = simulate(config)
    return Timed(result, time.process_time() - cpu, time.perf_counter() - wall)


def _together(ranks: int, simulated: int, rate: float, seconds: float, seed: int) -> SimConfig:
    layout = Layout("both", ranks, redundant_per_rank=1, weights_dtype=FP8)
    return SimConfig(
        arrivals=poisson(rate * ranks, seconds, ISL, OSL, seed),
        pools=(Pool(layout, kv_tokens=100_000, max_num_batched_tokens=1024),),
        **_deployment(seconds / 3),
        stand_for=ranks // simulated,
        seed=seed,
    )


def _hour() -> SimConfig:
    """LMSYS' deployment of DeepSeek-V3 on 96 H100, roughly: EP32 prefill, EP64 decode."""
    prefill = Layout("prefill", 32, redundant_per_rank=1, overlap="tbo", weights_dtype=FP8)
    decode = Layout("decode", 64, redundant_per_rank=1, mode="low_latency", weights_dtype=FP8)
    return SimConfig(
        arrivals=poisson(HOUR_RATE, 3600.0, HOUR_ISL, HOUR_OSL),
        pools=(Pool(prefill, kv_tokens=100_000), Pool(decode, kv_tokens=400_000)),
        kv_link=KVLink(load_model(MODEL).kv_bytes_per_token(), 50e9, 1e-5),
        stand_for=STAND_FOR,
        **_deployment(600.0),
    )


def _deployment(interval_s: float) -> dict[str, Any]:
    spec, hardware = load_model(MODEL), load_hardware(GPU)
    link = hardware.outer or hardware.inner
    return {
        "step_time": PricedSteps(spec, hardware),
        "experts": zipf_loads(LAYERS, spec.moe.num_experts, spec.moe.top_k, 0.5),
        "rebalance": Rebalance(POLICIES["eplb"], interval_s, spec.expert_params, link.bytes_per_s),
    }


def report(run: PlanBenchRun, command: str) -> Report:
    cases = [_speed(*pair, turns, run.options.target) for pair, turns in run.turns.items()]
    cases += _growth(run)
    if run.hour is not None:
        cases.append(_hour_case(run.hour))
    notes = {"model": MODEL, "gpu": GPU, "clock": "processor time of one process"}
    return Report(command, cpu_name(), tuple(cases), notes)


def _speed(ranks: int, simulated: int, turns: list[Timed], target: float | None) -> Case:
    return case_of(
        "simulator_speed",
        [60 * t.rank_steps / t.cpu_s for t in turns],
        "rank-steps/min",
        "higher",
        {
            "ranks": ranks,
            "simulated": simulated,
            "tokens_per_rank_step": round(turns[0].tokens_per_rank_step, 1),
        },
        target=target,
        more={
            "rank_steps": [t.rank_steps for t in turns],
            "cpu_s": [t.cpu_s for t in turns],
            "wall_s": [t.wall_s for t in turns],
        },
    )


def _growth(run: PlanBenchRun) -> Iterator[Case]:
    """Time for a rank-step at the most ranks over that at the fewest, every rank simulated: 1 is
    linear."""
    fewest, most = min(run.options.ranks), max(run.options.ranks)
    if fewest < most:
        yield case_of(
            "time_per_rank_step",
            [
                (many.cpu_s / many.rank_steps) / (few.cpu_s / few.rank_steps)
                for few, many in zip(run.turns[fewest, fewest], run.turns[most, most], strict=True)
            ],
            "x",
            "lower",
            {"variant": f"{most} ranks / {fewest} ranks"},
        )


def _hour_case(hour: Timed) -> Case:
    return case_of(
        "hour_of_96_gpus",
        [hour.cpu_s],
        "s",
        "lower",
        {"isl": HOUR_ISL, "osl": HOUR_OSL, "requests": hour.result.requests},
        more={
            "rank_steps": hour.rank_steps,
            "wall_s": hour.wall_s,
            "verdict": hour.result.verdict,
            "stand_for": STAND_FOR,
        },
    )
