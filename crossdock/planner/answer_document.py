"""An answer as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from crossdock.planner.answer import Answer, Question
from crossdock.planner.commands import (
    Command,
    crossdock_commands,
    missing_here,
    redundant_experts,
    sglang_commands,
    vllm_commands,
)
from crossdock.planner.facts import model_facts
from crossdock.planner.search_deployment import Deployment, Side
from crossdock.planner.search_points import Point


def document(answer: Answer) -> dict[str, Any]:
    """Times in ms, memory in bytes, errors as shares; `commands` one a line, as to be typed."""
    q = answer.question
    facts = model_facts(q.spec, q.work.isl, q.formats.weights_dtype, q.formats.kv_dtype)
    return {
        "command": "plan",
        "model": {
            "name": q.model,
            "architecture": q.spec.architecture,
            **asdict(facts),
            "weight_bytes": facts.weights.total,
        },
        "hardware": {"name": q.hardware.name, **asdict(q.hardware)},
        "workload": {**asdict(q.work), "weights_dtype": q.formats.weights_dtype},
        "gpus": q.gpus,
        "recommended": deployment_document(answer.best, q),
        "why": why(answer),
        "runners_up": [deployment_document(d, q) for d in answer.runners_up],
        "tensor_parallel": answer.tensor_parallel
        and deployment_document(answer.tensor_parallel, q),
        "roles": {name: point_document(p, q) for name, p in answer.roles.items()},
        "runnable": answer.runnable and deployment_document(answer.runnable, q),
        "not_runnable": answer.not_runnable,
        "memory": {
            role: {
                "parts": plan.parts(),
                "sum": plan.used_bytes,
                "budget": plan.budget_bytes,
                "kv": plan.kv_bytes,
                "kv_tokens": plan.kv_tokens,
                "requests": plan.requests,
            }
            for role, plan in answer.memory.items()
        },
        "smallest_ep": {"ranks": answer.smallest.ranks, "even": answer.smallest.even},
        "step_ms": {
            role: step_document(side.point)
            for role, side in (("prefill", answer.best.prefill), ("decode", answer.best.decode))
        },
        "median_error": answer.errors,
        "commands": [asdict(command) for command in commands(answer)],
        "search": {"points": answer.found.priced, "seconds": answer.seconds},
    }


def deployment_document(d: Deployment, q: Question) -> dict[str, Any]:
    rates = Rates(d, q)
    return {
        "kind": d.kind,
        "gpus": d.gpus,
        "requests_per_s": d.rate,
        "capacity_requests_per_s": d.capacity,
        "overloaded": d.overloaded,
        "ttft_ms": d.ttft_s * 1e3,
        "tpot_ms": d.tpot_s * 1e3,
        "tokens_per_s_per_user": 1 / d.tpot_s,
        "input_tokens_per_s_per_gpu": rates.input_per_gpu,
        "output_tokens_per_s_per_gpu": rates.output_per_gpu,
        "usd_per_million_output_tokens": rates.usd_per_million_output,
        "usd_per_million_tokens": rates.usd_per_million,
        "prefill": side_document(d.prefill, q),
        "decode": side_document(d.decode, q),
        "missing_in_this_version": list(missing_here(d, q.spec, q.hardware)),
    }


class Rates:
    """Tokens per second and GPU of all the deployment's GPUs, and what tokens cost."""

    def __init__(self, d: Deployment, q: Question):
        self.input_per_gpu = d.rate * q.work.isl / d.gpus
        self.output_per_gpu = d.rate * q.work.osl / d.gpus
        self.usd_per_million_output = self.usd_per_million = None
        if q.price is not None:
            per_second = q.price / 3600
            self.usd_per_million_output = per_second / self.output_per_gpu * 1e6
            self.usd_per_million = per_second / (self.input_per_gpu + self.output_per_gpu) * 1e6


def side_document(side: Side, q: Question) -> dict[str, Any]:
    return {
        "instances": side.instances,
        **point_document(side.point, q),
        "load": side.load,
        "bound": side.bound,
    }


def point_document(point: Point, q: Question) -> dict[str, Any]:
    layout = point.layout
    return {
        "gpus": layout.gpus,
        "tp": layout.tp,
        "dp": layout.dp,
        "ep": layout.gpus if layout.experts == "ep" else 1,
        "experts": layout.experts,
        "redundant_experts": redundant_experts(layout, q.spec),
        "mode": layout.mode,
        "overlap": layout.overlap,
        "max_tokens_per_rank": layout.max_tokens_per_rank,
        "batch_per_gpu": point.batch,
        "step_ms": point.step.total * 1e3,
        "tokens_per_s_per_gpu": tokens_per_gpu_s(point, q),
    }


def tokens_per_gpu_s(point: Point, q: Question) -> float:
    """Of the role's own GPUs with every step full."""
    length = q.work.isl if point.phase == "prefill" else q.work.osl
    return point.requests_per_gpu_s * length


def step_document(point: Point) -> dict[str, Any]:
    return {
        "parts": {name: seconds * 1e3 for name, seconds in point.step.parts.items()},
        "hidden": point.step.hidden * 1e3,
        "total": point.step.total * 1e3,
        "exposed_communication": point.step.exposed_communication * 1e3,
    }


def commands(answer: Answer) -> list[Command]:
    q = answer.question
    made: list[Command] = []
    if answer.runnable is not None:
        made += crossdock_commands(q.model, answer.runnable, q.spec, q.work.isl, q.work.osl)
    made += sglang_commands(q.model, answer.best, q.spec, q.hardware)
    return made + vllm_commands(q.model, answer.best, q.spec, q.hardware)


def why(answer: Answer) -> list[str]:
    """Reasons for the recommended deployment, each with its numbers."""
    best, q = answer.best, answer.question
    lines = [_binding(best)]
    p, d = best.prefill.point.layout, best.decode.point.layout
    smallest = answer.smallest.ranks
    lines.append(
        f"experts over ranks: EP{p.gpus} for prefill, EP{d.gpus} for decode; "
        + (f"the smallest that fits is EP{smallest}" if smallest else "")
    )
    if (tp := answer.tensor_parallel) is not None:
        lines.append(_beside_tp(best, tp))
    other = next((r for r in answer.runners_up if r.kind != best.kind), None)
    if other is not None:
        lines.append(_other_kind(best, other))
    if q.work.request_rate is None:
        better = [r for r in answer.runners_up if r.capacity > best.capacity * 1.005]
    else:
        better = [r for r in answer.runners_up if r.gpus < best.gpus and not r.overloaded]
    if better:
        lines.append(_why_not(best, max(better, key=lambda r: r.capacity / r.gpus)))
    return lines


def _beside_tp(best: Deployment, tp: Deployment) -> str:
    width = tp.decode.point.layout.tp
    per_gpu = best.rate / best.gpus / (tp.rate / tp.gpus)
    if per_gpu < 1:
        return (
            f"experts sharded by TP{width} would serve {1 / per_gpu:.2f} times as much per GPU "
            "(crossdock shards none): at this size an all-reduce costs less than uneven experts do"
        )
    return (
        f"attention data-parallel and experts over ranks serve {per_gpu:.1f} times as much per GPU "
        f"as experts sharded by TP{width} ({rate_text(tp.rate)} requests/s on {tp.gpus:,} GPUs), "
        "where all tokens of a group pass an all-reduce twice a layer"
    )


def _why_not(best: Deployment, faster: Deployment) -> str:
    gain = faster.capacity / faster.gpus / (best.capacity / best.gpus) - 1
    line = (
        f"{_sizes(faster)} would serve {gain:.0%} more per GPU, which is within what this model "
        "can tell apart; "
    )
    if best.roomy and not faster.roomy:
        return line + (
            f"but weights take {_fullest(faster):.0%} of a GPU's usable memory there, "
            f"{_fullest(best):.0%} here"
        )
    return line + (
        f"but a user gets {number_text(1 / faster.tpot_s)} tokens/s there, "
        f"{number_text(1 / best.tpot_s)} here"
    )


def _binding(best: Deployment) -> str:
    sides: Sequence[tuple[str, Side]] = (("prefill", best.prefill), ("decode", best.decode))
    if best.kind == "together":
        return (
            f"both roles share the GPUs; decode's batch is bound by {best.decode.bound}; prefill's "
            f"by {best.prefill.bound}"
        )
    (name, side), (slack, other) = sorted(sides, key=lambda pair: -pair[1].load)
    part, share = largest_part(side.point)
    return (
        f"{name} binds: its instances are at {side.load:.0%} of their capacity, {slack}'s at "
        f"{other.load:.0%}; a {name} step is bound by {side.bound}; its largest part is {part}, "
        f"{share:.0%}"
    )


def largest_part(point: Point) -> tuple[str, float]:
    parts = point.step.parts
    name = max(parts, key=lambda part: parts[part])
    return part_name(name), parts[name] / sum(parts.values())


def rate_text(rate: float) -> str:
    return number_text(rate, 4)


def number_text(value: float, digits: int = 3) -> str:
    """Digits that count: what is small must not look like nothing."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def usd_text(value: float) -> str:
    return f"${value:,.2f}" if value >= 1 else f"${value:.3g}"


def part_name(part: str) -> str:
    return "between steps" if part == "step" else part.replace("_", " ")


def _other_kind(best: Deployment, other: Deployment) -> str:
    what = "on the same instances" if other.kind == "together" else "on instances of their own"
    return (
        f"both phases {what} ({_sizes(other)}) would serve {rate_text(other.rate)} requests/s on "
        f"{other.gpus} GPUs at TPOT {other.tpot_s * 1e3:.0f} ms, here {rate_text(best.rate)} on "
        f"{best.gpus} at {best.tpot_s * 1e3:.0f} ms"
    )


def _sizes(d: Deployment) -> str:
    p, q = d.prefill, d.decode
    if d.kind == "together":
        return f"{p.instances} x EP{p.point.layout.gpus}"
    return (
        f"{p.instances} x EP{p.point.layout.gpus} prefill and {q.instances} x "
        f"EP{q.point.layout.gpus} decode"
    )


def _fullest(d: Deployment) -> float:
    return max(side.point.fit.weights_share for side in (d.prefill, d.decode))
