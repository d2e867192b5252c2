"""The answer to a question about a deployment: what to run, why, and what it was compared with."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from crossdock.core import CapacityError, ConfigError, ModelSpec
from crossdock.planner.commands import kv_runs, missing_here, missing_in_layout, weights_run
from crossdock.planner.cost import BYTES
from crossdock.planner.facts import native_dtype
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.memory import MemoryPlan, SmallestEP, smallest_ep
from crossdock.planner.search import Found, search
from crossdock.planner.search_deployment import ROOMY, Deployment, name_of
from crossdock.planner.search_points import Curve, Point
from crossdock.planner.search_pricing import CostPricing
from crossdock.planner.search_space import ANY_NUMBER, Formats
from crossdock.planner.validate import median_error

ALIKE = 2
"""Runners-up of one kind and size of prefill."""


@dataclass(frozen=True)
class Question:
    """`model`: as the user called it; `gpus`: at hand, None: as many as `work.request_rate` needs;
    `price`: of a GPU hour, in dollars."""

    model: str
    spec: ModelSpec
    hardware: Hardware
    work: Workload
    formats: Formats
    gpus: int | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if self.gpus is None and self.work.request_rate is None:
            raise ConfigError("give --gpus (those at hand), --rate (requests per second), or both")
        longest, length = self.spec.max_position, self.work.isl + self.work.osl
        if length > longest:
            raise ConfigError(
                f"--isl {self.work.isl:,} and --osl {self.work.osl:,} make {length:,} tokens; the "
                f"model goes to {longest:,}: {length - longest:,} too many"
            )


@dataclass(frozen=True)
class Answer:
    """`runners_up`: the next best, without those of `tensor_parallel` (experts by TP, to compare).
    `runnable`: the best that this version of crossdock runs, or None and `not_runnable` says why.
    `roles`: the layout of each role with most tokens per second and GPU, the other role left out.
    """

    question: Question
    best: Deployment
    runners_up: tuple[Deployment, ...]
    tensor_parallel: Deployment | None
    runnable: Deployment | None
    not_runnable: str
    roles: dict[str, Point]
    memory: dict[str, MemoryPlan]
    smallest: SmallestEP
    errors: dict[str, float]
    found: Found
    pricing: CostPricing
    seconds: float


Progress = Callable[[str, int, int], None]


def formats_of(spec: ModelSpec, weights: str | None, kv: str | None) -> Formats:
    """The checkpoint's own weights and BF16 KV, unless told otherwise. Raises ConfigError."""
    names = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
    chosen = []
    for flag, value, default in (
        ("--weights-dtype", weights, native_dtype(spec)),
        ("--kv-dtype", kv, "bfloat16"),
    ):
        name = default if value is None else names.get(value, value)
        if name not in BYTES or name == "nvfp4":
            raise ConfigError(f"{flag} {value!r}: expected bf16 or fp8")
        chosen.append(name)
    return Formats(*chosen)


def answer_question(
    question: Question,
    runners_up: int = 5,
    on_progress: Progress = lambda _what, _done, _total: None,
) -> Answer:
    """Searches all layouts.

    Raises:
        CapacityError: no layout does; says which number is short and by how much.
    """
    began = time.perf_counter()
    q = question
    pricing = CostPricing(q.spec, q.hardware, q.work)
    smallest = smallest_ep(q.spec, q.hardware, least_layout(q), q.work)
    gpus = ANY_NUMBER if q.gpus is None else q.gpus
    looked = partial(search, q.spec, q.hardware, q.work, pricing, q.formats, gpus, tie=tie())
    by_experts: list[Deployment] = []
    by_tp: list[Deployment] = []
    try:
        found = looked(on_progress=lambda done, total: on_progress("layouts", done, total))
        by_experts = [d for d in found.ranked if d.experts == "ep"]
        by_tp = [d for d in found.ranked if d.experts == "tp"]
        if not by_experts:
            looked(allowed=lambda layout: layout.experts == "ep")  # says what is short
    except CapacityError as error:
        message = _with_arithmetic(str(error), smallest, gpus)
        raise CapacityError("\n  ".join([message, *map(_by_tp, by_tp[:1])])) from None
    best = by_experts[0]
    if best.overloaded:
        raise CapacityError(_overload(best, q))
    runnable, why = _runnable(q, best, gpus, on_progress)
    sides = {"prefill": best.prefill, "decode": best.decode}
    return Answer(
        question=q,
        best=best,
        runners_up=_varied(by_experts[1:], runners_up),
        tensor_parallel=by_tp[0] if by_tp else None,
        runnable=runnable,
        not_runnable=why,
        roles=_roles(found, q.work),
        memory=_memory(pricing, best),
        smallest=smallest,
        errors={role: median_error(role) for role in sides},
        found=found,
        pricing=pricing,
        seconds=time.perf_counter() - began,
    )


def _varied(ranked: Sequence[Deployment], number: int) -> tuple[Deployment, ...]:
    """The first ones, two at most of a kind and size of prefill."""
    seen: Counter[tuple[str, int]] = Counter()
    kept = []
    for deployment in ranked:
        key = deployment.kind, deployment.prefill.point.layout.gpus
        seen[key] += 1
        if seen[key] <= ALIKE:
            kept.append(deployment)
    return tuple(kept[:number])


def _memory(pricing: CostPricing, best: Deployment) -> dict[str, MemoryPlan]:
    """By role; of GPUs that serve both, one plan, for the larger steps of prefill."""
    prefill, decode = (side.point.layout for side in (best.prefill, best.decode))
    if best.kind == "together":
        prefill = decode = replace(prefill, role="both")
    return {"prefill": pricing.memory(prefill), "decode": pricing.memory(decode)}


def least_layout(question: Question) -> Layout:
    """The decode layout that the smallest EP size is asked for: one sequence per GPU."""
    return Layout(
        role="decode",
        gpus=1,
        max_tokens_per_rank=1,
        weights_dtype=question.formats.weights_dtype,
        kv_dtype=question.formats.kv_dtype,
    )


def tie() -> float:
    """Share by which two predictions differ by chance, one standard deviation: the median absolute
    error is 0.67 of those, and the difference of two errors has sqrt(2) of one's."""
    return math.sqrt(2) / 0.67 * max(median_error("prefill"), median_error("decode"))


def _roles(found: Found, work: Workload) -> dict[str, Point]:
    def most(curves: tuple[Curve, ...], limit_s: float | None) -> Point:
        points = (c.best(limit_s) for c in curves if c.layout.experts == "ep")
        within = [point for point in points if point]
        least = max(point.requests_per_gpu_s for point in within) * (1 - tie())
        equal = [point for point in within if point.requests_per_gpu_s >= least]
        return max(equal, key=lambda p: (p.fit.weights_share <= ROOMY, p.requests_per_gpu_s))

    return {
        "prefill": most(found.prefill, work.ttft_s),
        "decode": most(found.decode, work.tpot_s),
    }


def _runnable(
    q: Question, best: Deployment, gpus: int, on_progress: Progress
) -> tuple[Deployment | None, str]:
    if not missing_here(best, q.spec, q.hardware):
        return best, ""
    plain = q.spec.dtype if q.spec.dtype in ("float16", "float32") else "bfloat16"
    formats = Formats(
        q.formats.weights_dtype if weights_run(q.formats.weights_dtype, q.hardware) else plain,
        q.formats.kv_dtype if kv_runs(q.formats.kv_dtype, q.hardware) else plain,
    )
    try:
        found = search(
            q.spec,
            q.hardware,
            q.work,
            CostPricing(q.spec, q.hardware, q.work),
            formats,
            gpus,
            allowed=lambda layout: not missing_in_layout(layout, q.spec, q.hardware),
            split=False,
            tie=tie(),
            on_progress=lambda done, total: on_progress("runnable layouts", done, total),
        )
    except CapacityError as error:
        return None, str(error).split(": raise")[0]  # that advice is for the deployment above
    if found.ranked[0].overloaded:
        return None, _overload(found.ranked[0], q)
    return found.ranked[0], ""


def _overload(deployment: Deployment, q: Question) -> str:
    """Of a rate that is asked for and not carried."""
    asked = q.work.request_rate or 0.0
    needed = -(-deployment.gpus * asked // deployment.rate)
    gpus = f"{ANY_NUMBER:,} GPUs, the most looked at" if q.gpus is None else f"{q.gpus:,} GPUs"
    return (
        f"--rate {asked:g} overloads {gpus}: the best layout carries {deployment.rate:.4g} "
        f"requests/s at {deployment.rate / deployment.capacity:.0%} load: short by "
        f"{asked - deployment.rate:.4g} requests/s, about {needed - deployment.gpus:,.0f} GPUs"
    )


def _by_tp(deployment: Deployment) -> str:
    return (
        f"experts sharded by {name_of(deployment.decode.point.layout)} would meet the limits (TTFT "
        f"{deployment.ttft_s * 1e3:,.0f} ms, TPOT {deployment.tpot_s * 1e3:,.1f} ms); crossdock "
        "shards none"
    )


def _with_arithmetic(message: str, smallest: SmallestEP, gpus: int) -> str:
    if smallest.ranks is None or smallest.ranks > gpus:
        return "\n  ".join([message, *smallest.lines])
    return message
