"""Where the steps of `bench engine` go, and what share of the device's ceilings they reach."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from crossdock.bench.report import Case, case_of
from crossdock.core.ceilings import Ceilings

PARTS = (
    "host_gap", "agree", "attention", "router", "dispatch", "experts", "shared", "combine", "dense",
    "norm", "sample",
)  # fmt: skip
BESIDE = ("wait", "dispatch_apart", "combine_apart")
"""Within other parts, or at the same time."""
_SHARES = (("mfu", "timed_flops", "flops_per_s"), ("mbu", "timed_bytes", "bytes_per_s"))

Answer = Mapping[str, Any]
"""Of a child, as `engine_ours` gives it: a dict of totals by rank under "parts"."""


def step_cases(
    answers: Sequence[Answer], traced: Answer | None, ceilings: Ceilings, shape: dict[str, Any]
) -> Iterator[Case]:
    """
    Args:
        answers: of the measured turns.
        traced: of one more turn, whose steps were all timed; None where there was none.
    """
    ranks = [rank for answer in answers for rank in answer["parts"]]
    timed = [rank for rank in ranks if rank["calls"].get("step")]
    more: dict[str, Any] = {} if traced is None else {"phases": _phases(traced, ceilings)}
    if not timed and traced is not None:  # too few steps for a timed one
        timed = [rank for rank in traced["parts"] if rank["calls"].get("step")]
    if not timed:
        return
    yield _step(timed, more, shape)
    exchanges = [_exposed(rank) for rank in timed]
    yield case_of("exposed_communication", exchanges, "share of step", "lower", shape)
    for name, work, ceiling in _SHARES:
        shares = [
            rank["counters"][work]
            / (rank["counters"]["timed_ns"] * 1e-9 * getattr(ceilings, ceiling))
            for rank in timed
            if rank["counters"].get("timed_ns")
        ]
        if shares:
            yield case_of(
                name,
                shares,
                "share of ceiling",
                "higher",
                shape,
                more={"ceilings": asdict(ceilings)},
            )


def _phases(traced: Answer, ceilings: Ceilings) -> dict[str, Any]:
    return {
        name: {
            **phase,
            "mfu": phase["flops_per_s"] / ceilings.flops_per_s,
            "mbu": phase["bytes_per_s"] / ceilings.bytes_per_s,
        }
        for name, phase in traced["phases"].items()
    }


def _step(ranks: Sequence[Mapping[str, Any]], more: dict[str, Any], shape: dict[str, Any]) -> Case:
    """Mean time of a step of each rank and turn, and of its parts, over all of them. On a GPU of
    the steps that were timed."""
    steps = [rank["seconds"]["step"] / rank["calls"]["step"] * 1e3 for rank in ranks]
    count = sum(rank["calls"]["step"] for rank in ranks)
    parts = {
        part: sum(rank["seconds"].get(part, 0.0) for rank in ranks) / count * 1e3
        for part in (*PARTS, *BESIDE)
        if any(part in rank["seconds"] for rank in ranks)
    }
    whole = sum(rank["seconds"]["step"] for rank in ranks) / count * 1e3
    parts["other"] = whole - sum(ms for part, ms in parts.items() if part not in BESIDE)
    return case_of(
        "step", steps, "ms", "lower", shape, more={"parts_ms": parts, "steps": count, **more}
    )


def _exposed(rank: Mapping[str, Any]) -> float:
    seconds = rank["seconds"]
    return (seconds.get("dispatch", 0.0) + seconds.get("combine", 0.0)) / seconds["step"]
