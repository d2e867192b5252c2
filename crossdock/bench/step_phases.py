"""Traced steps of all ranks, as means by phase."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossdock.core.messages import Traced

EXCHANGE = ("dispatch", "combine")
HOST = ("step", "agree")
"""Beside a device, what its host does."""
NS_PER_MS = 1e6


def phases(traces: Sequence[Traced]) -> dict[str, dict[str, Any]]:
    """By "prefill" (steps in which any rank has a prompt) and "decode": "steps", and "parts_ms",
    the mean of a step of a rank: "step" and what it has of each part. On a GPU both are of the
    device, from a step's first event to its last, and "wait" is what each dispatch and combine took
    beyond the shortest of any rank. "flops_per_s" and "bytes_per_s": of a rank, what its work
    needed over its steps' time."""
    prompts = {
        step for trace in traces for step, tokens, decodes, *_ in trace.steps if tokens > decodes
    }
    every = {step for trace in traces for step, *_ in trace.steps}
    found = {}
    for name, steps in (("prefill", prompts), ("decode", every - prompts)):
        if steps:
            parts = _means(traces, steps)
            seconds = parts["step"] * 1e-3 * len(steps) * len(traces)
            sizes = [size for trace in traces for size in trace.steps if size[0] in steps]
            found[name] = {
                "steps": len(steps),
                "parts_ms": parts,
                "flops_per_s": sum(flops for *_, flops, _ in sizes) / seconds,
                "bytes_per_s": sum(nbytes for *_, nbytes in sizes) / seconds,
            }
    return found


def first_steps(trace: Traced, count: int) -> Traced:
    """The first `count` of its steps."""
    steps = trace.steps[:count]
    kept = {step for step, *_ in steps}
    intervals = tuple(interval for interval in trace.intervals if interval[0] in kept)
    return replace(trace, intervals=intervals, steps=steps)


def _means(traces: Sequence[Traced], steps: set[int]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    on_device = any(part == "device" for t in traces for _, part, _, _ in t.intervals)
    whole = "device" if on_device else "step"
    for trace in traces:
        for step, part, start, end in trace.intervals:
            if step in steps and not (on_device and part in HOST):
                sums["step" if part == whole else part] += end - start
    if on_device:
        sums["wait"] = _waits(traces, steps)
    count = len(steps) * len(traces) * NS_PER_MS
    return {part: ns / count for part, ns in sums.items() if ns}


def _waits(traces: Sequence[Traced], steps: set[int]) -> float:
    """Exchange by exchange. Those of a step that ranks did not all see alike are left out."""
    seen: dict[tuple[int, str], list[list[int]]] = defaultdict(list)
    for trace in traces:
        mine: dict[tuple[int, str], list[int]] = defaultdict(list)
        for step, part, start, end in trace.intervals:
            if step in steps and part in EXCHANGE:
                mine[step, part].append(end - start)
        for key, took in mine.items():
            seen[key].append(took)
    return float(
        sum(
            sum(row) - len(row) * min(row)
            for took_R in seen.values()
            if len(took_R) == len(traces) and len({len(took) for took in took_R}) == 1
            for row in zip(*took_R, strict=True)
        )
    )
