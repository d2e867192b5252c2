"""`bench balance`: the planners side by side, on made, drifting and recorded loads."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from crossdock.balance import (
    POLICIES,
    Answer,
    Problem,
    imbalance,
    linear_placement,
    moved_experts,
    rank_load,
    settle,
)
from crossdock.balance.eplb import rebalance_experts
from crossdock.balance.generate import draw_loads, zipf_weights
from crossdock.balance.homes import home_slots
from crossdock.bench.balance_choice import replica_choices
from crossdock.bench.balance_loads import drifting_loads, record
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.core import ConfigError

PLANNERS = ("eplb", "quota", "llep", "lp", "sticky")
EXPERTS, REDUNDANT, TOP_K = 256, 2, 8
RATIOS = (1.5, 2.0, 2.5, 3.0)
SEED = 33
MOST_REPLICAS = {1.5: 41, 2.0: 49, 3.0: 54}
README_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
MEASURES = ("planning", "small", "generator", "choice", "reroute", "drift")
FLASHLB_LOADS = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])


@dataclass(frozen=True)
class BalanceOptions:
    """`tokens`: a rank's, drawn for each load; `model`: whose routing is recorded, None for no
    recorded loads; `layers`, `windows`: of drifting loads; `repeats`: of planning times. `measure`:
    some of `MEASURES`, of made loads."""

    ranks: tuple[int, ...] = (32, 64)
    seeds: int = 10
    tokens: int = 2048
    layers: int = 4
    windows: int = 12
    repeats: int = 30
    model: str | None = None
    measure: tuple[str, ...] = MEASURES


def run_balance(options: BalanceOptions, on_progress: Callable[[str], None]) -> list[Case]:
    """
    Raises:
        ConfigError: a measure that there is not.
    """
    for what in options.measure:
        if what not in MEASURES:
            raise ConfigError(f"--measure {what!r}: expected some of {', '.join(MEASURES)}")
    POLICIES["lp"](Problem(FLASHLB_LOADS, 8, 2))  # imports scipy, which is not planning
    parts: dict[str, Callable[[BalanceOptions, Callable[[str], None]], Iterator[Case]]] = {
        "planning": lambda options, _: iter(planning_time(options.repeats)),
        "small": _small,
        "generator": _generator,
        "choice": _choice,
        "reroute": _reroute,
        "drift": _drift,
    }
    cases = [
        case for what in MEASURES if what in options.measure
        for case in parts[what](options, on_progress)
    ]  # fmt: skip
    if options.model is not None:
        on_progress(f"recording {options.model}")
        for kind, loads in record(options.model).items():
            experts = loads[0].shape[1]
            for ranks in (4, 8):
                cases += drifting({"loads": kind}, loads, ranks, -experts % ranks + ranks)
    return cases


def _small(options: BalanceOptions, on_progress: Callable[[str], None]) -> Iterator[Case]:
    on_progress("small cases beside optimal")
    yield from small_cases(options.seeds)


def _generator(options: BalanceOptions, on_progress: Callable[[str], None]) -> Iterator[Case]:
    for ranks in options.ranks:
        for ratio in RATIOS:
            on_progress(f"generator: {ranks} ranks, ratio {ratio}")
            yield from generated(ranks, ratio, options.seeds, options.tokens)


def _choice(options: BalanceOptions, on_progress: Callable[[str], None]) -> Iterator[Case]:
    for ranks in options.ranks:
        on_progress(f"choice of replicas: {ranks} ranks")
        for tokens in (128, options.tokens):
            yield from replica_choices(ranks, options.seeds, tokens)


def _reroute(options: BalanceOptions, on_progress: Callable[[str], None]) -> Iterator[Case]:
    from crossdock.bench.balance_reroute import exchange_times, reroute_times  # need torch

    on_progress("rerouting by quota")
    yield from reroute_times(options.ranks, options.repeats)
    yield from exchange_times(options.repeats)


def _drift(options: BalanceOptions, on_progress: Callable[[str], None]) -> Iterator[Case]:
    for ranks in options.ranks:
        for drift in (0.1, 0.2):
            on_progress(f"drifting loads: {ranks} ranks, {drift:g} a window")
            tokens = options.tokens * ranks * TOP_K
            loads = drifting_loads(options.layers, EXPERTS, options.windows + 1, drift, tokens)
            yield from drifting({"loads": f"drift {drift:g}"}, loads, ranks, ranks * REDUNDANT)


def report(options: BalanceOptions, cases: Sequence[Case], command: str) -> Report:
    notes = {
        "options": dict(vars(options)),
        "meaning": {
            "eplb_planning": "wall clock; beside it the processor's time, which others on the "
            "machine do not lengthen",
            "imbalance": "load of the fullest rank over the mean; `before`: with the placement at "
            "the start, which `moves` and replicas are counted from",
            "generator": "means over seeds; experts at home in order, the redundant slots empty; "
            "lp splits over eplb's copies",
            "choice": "one step of so many tokens a rank, copies placed by eplb for their "
            "popularity; on_own_rank: the part that does not travel; all ranks on one node",
            "reroute": "by quota, one layer, a rank's share: counting, planning, choosing; on a "
            "GPU replays of a graph, beside it planning alone and the exchange between its GPUs",
            "drift": "planned on window i, scored on i + 1; moves by experts that reach a rank "
            "without them, all windows and layers; the start is the linear placement",
            "small": "means over layers or loads; optimal splits equally, so quota and lp can "
            "be below it",
        },
    }
    return Report(command, cpu_name(), tuple(cases), notes)


def planning_time(repeats: int) -> list[Case]:
    """EPLB of 58 layers x 256 experts to 288 slots on 32 ranks of 4 nodes."""
    load_LE = np.random.default_rng(SEED).gamma(0.5, 1000, (58, EXPERTS)).round()
    cases = []
    for name, groups, nodes, target in (("hierarchical", 8, 4, 4.0), ("global", 1, 1, 8.0)):
        times, cpu = [], []
        for _ in range(repeats):
            start = time.process_time()
            times.append(_timed(partial(rebalance_experts, load_LE, 288, groups, nodes, 32))[1])
            cpu.append((time.process_time() - start) * 1e3)
        shape = {"layers": 58, "experts": EXPERTS, "slots": 288, "ranks": 32, "mode": name}
        for figure, values in (("eplb_planning", times), ("eplb_planning_processor", cpu)):
            more = {"fastest_ms": min(values)}
            cases.append(case_of(figure, values, "ms", "lower", shape, target=target, more=more))
    return cases


def small_cases(seeds: int) -> list[Case]:
    """Against the best that equal shares allow."""
    rng = np.random.default_rng(SEED)
    random_LE = np.round(rng.lognormal(4.0, 1.2, (seeds, 7)))
    cases = []
    for name, load_LE, ranks, slots in (
        ("EPLB README", README_LOADS, 8, 2),
        ("FlashLB", FLASHLB_LOADS, 8, 2),
        ("random", random_LE, 3, 3),
    ):
        problem = Problem(load_LE, ranks, slots)
        for policy in (*PLANNERS, "optimal"):
            answer, ms = _timed(partial(POLICIES[policy], problem))
            most_L = rank_load(load_LE, answer, ranks).max(axis=1)
            toy = name == "FlashLB" and policy in ("quota", "sticky")
            more = {"imbalance": float(imbalance(load_LE, answer, ranks).mean()), "ms": ms}
            shape = {"case": name, "ranks": ranks, "slots": slots, "policy": policy}
            cases.append(
                _mean(
                    "small_fullest_rank",
                    most_L,
                    "tokens",
                    shape,
                    target=205.0 if toy else None,
                    more=more,
                )
            )
    return cases


def generated(ranks: int, ratio: float, seeds: int, tokens: int) -> list[Case]:
    """UltraEP's loads, one layer a seed, every policy."""
    rows = []
    for seed in range(SEED, SEED + seeds):
        rng = np.random.default_rng(seed)
        weight_E = zipf_weights(EXPERTS, ranks, TOP_K, ratio, rng)
        rows.append(draw_loads(weight_E, tokens * ranks, TOP_K, rng))
    load_LE = np.array(rows)
    problem = Problem(load_LE, ranks, EXPERTS // ranks + REDUNDANT)
    start_LP = _at_home(problem)
    before = float(imbalance(load_LE, Answer(start_LP), ranks).mean())
    cases = []
    for policy in PLANNERS:
        # The linear programme would have no copies to split over at the start.
        current_LP = None if policy == "lp" else start_LP
        answer, ms = _timed(partial(POLICIES[policy], replace(problem, current_LP=current_LP)))
        replicas_L = (answer.slot_expert_LP >= 0).sum(axis=1) - EXPERTS
        moves_L = moved_experts(start_LP, answer.slot_expert_LP, ranks)
        shape = {"ranks": ranks, "ratio": ratio, "policy": policy}
        more = {
            "before": before,
            "replicas": float(replicas_L.mean()),
            "moves": float(moves_L.mean()),
            "ms_per_layer": ms / seeds,
        }
        promised = policy == "quota" and ranks == 64
        cases.append(
            _mean(
                "generator_imbalance",
                imbalance(load_LE, answer, ranks),
                "max/mean",
                shape,
                target=1.011 if promised else None,
                more=more,
            )
        )
        if promised and ratio in MOST_REPLICAS:
            cases.append(
                _mean(
                    "generator_replicas",
                    replicas_L,
                    "replicas",
                    shape,
                    target=float(MOST_REPLICAS[ratio]),
                )
            )
    return cases


def drifting(
    shape: Mapping[str, Any], loads: Sequence[np.ndarray], ranks: int, redundant: int
) -> list[Case]:
    """Plans on each window but the last from what is served then; scores on the next."""
    num_layers, experts = loads[0].shape
    slots = (experts + redundant) // ranks
    start_LP = linear_placement(num_layers, experts, ranks, redundant).slot_expert_LP
    first = POLICIES["eplb"](Problem(loads[0], ranks, slots))
    stays = {
        name: float(np.mean([imbalance(load_LE, answer, ranks).mean() for load_LE in loads[1:]]))
        for name, answer in (("start", Answer(start_LP)), ("first", first))
    }
    cases, means, moved = [], {}, {}
    for policy in PLANNERS:
        values, moves, ms = _follow(policy, loads, start_LP, ranks)
        means[policy], moved[policy] = float(np.mean(values)), moves
        more = {"before": stays["start"], "moves": moves, "ms_per_layer": ms / num_layers}
        at = {**shape, "ranks": ranks, "slots": slots, "policy": policy}
        cases.append(_mean("drift_imbalance", values, "max/mean", at, more=more))
    if not str(shape["loads"]).startswith("drift"):
        return cases
    at = {**shape, "ranks": ranks}
    for name in stays:
        if stays[name] > means["eplb"]:
            part = (stays[name] - means["sticky"]) / (stays[name] - means["eplb"])
            against = {"start": "the linear placement, kept", "first": "eplb's first plan, kept"}
            where = {**at, "compared with": against[name]}
            cases.append(
                _one("sticky_improvement_over_eplb", part, "higher", where, 0.9, stays[name])
            )
    part = moved["sticky"] / moved["eplb"]
    cases.append(_one("sticky_moves_over_eplb", part, "lower", at, 0.3, None))
    return cases


def _follow(
    policy: str, loads: Sequence[np.ndarray], start_LP: np.ndarray, ranks: int
) -> tuple[list[float], int, float]:
    """Imbalance of every next window, experts moved in all, and milliseconds of a plan."""
    slots = start_LP.shape[1] // ranks
    served_LP, values, moves, times = start_LP, [], 0, []
    for now_LE, next_LE in pairwise(loads):
        # The linear programme splits what eplb places; alone it would never move anything.
        current_LP = None if policy == "lp" else served_LP
        problem = Problem(now_LE, ranks, slots, current_LP=current_LP)
        answer, ms = _timed(partial(POLICIES[policy], problem))
        answer = settle(answer, served_LP, ranks)
        moves += int(moved_experts(served_LP, answer.slot_expert_LP, ranks).sum())
        served_LP = answer.slot_expert_LP
        values.append(float(imbalance(next_LE, answer, ranks).mean()))
        times.append(ms)
    return values, moves, float(np.median(times))


def _at_home(problem: Problem) -> np.ndarray:
    """Every expert at home and the other slots empty."""
    num_layers, num_experts = problem.load_LE.shape
    slot_expert_LP = np.full(
        (num_layers, problem.num_ranks * problem.slots_per_rank), -1, dtype=np.int64
    )
    np.put_along_axis(slot_expert_LP, home_slots(problem), np.arange(num_experts)[None], axis=1)
    return slot_expert_LP


def _timed(plan: Callable[[], Any]) -> tuple[Any, float]:
    """The result and milliseconds."""
    start = time.perf_counter()
    result = plan()
    return result, (time.perf_counter() - start) * 1e3


def _mean(
    name: str,
    values: Any,
    unit: str,
    shape: Mapping[str, Any],
    target: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> Case:
    """A case whose figure is the mean, as the targets are meant."""
    values = [round(float(value), 9) for value in values]  # 205.00000000000003 is 205
    case = case_of(name, values, unit, "lower", dict(shape), target=target)
    return replace(
        case,
        median=float(np.mean(values)),
        more={"figure": "mean", "values": values, **(more or {})},
    )


def _one(
    name: str,
    value: float,
    better: Any,
    shape: Mapping[str, Any],
    target: float | None,
    before: float | None,
) -> Case:
    more = {} if before is None else {"before": before}
    return case_of(name, [value], "ratio", better, dict(shape), target=target, more=more)
