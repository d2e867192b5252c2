"""Traced steps of all ranks as a document that Perfetto and chrome://tracing read (the Trace Event
Format: complete events, a process per rank and a thread per lane)."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from crossdock.core.messages import Traced

LANES = (
    "host", "device", "attention", "router", "dispatch", "experts", "shared", "combine", "dense",
    "norm", "sample", "dispatch_apart", "combine_apart", "wait", "counts",
)  # fmt: skip
"""From top to bottom, in each rank; further parts follow by name."""
_HOST = ("step", "agree")
_PIECE = 1000
"""Events."""


def timeline(traces: Sequence[Traced]) -> dict[str, Any]:
    """Times in us since the first thing that any rank did. Lane "host" is what the host's clock saw
    of whole steps and of agreeing on them, "device" the steps on a device's own timeline; on CPU
    ranks there is none, and every lane is the host's."""
    return {"traceEvents": list(_events(traces)), **_about(traces)}


def written(traces: Sequence[Traced]) -> Iterator[str]:
    """`timeline` as JSON, piece by piece: a large model's is hundreds of megabytes, and all other
    threads stand still while one piece is encoded."""
    yield '{"traceEvents":['
    events, before = _events(traces), ""
    while piece := list(islice(events, _PIECE)):
        yield before + json.dumps(piece, separators=(",", ":"))[1:-1]
        before = ","
    yield "]," + json.dumps(_about(traces), separators=(",", ":"))[1:]


def _events(traces: Sequence[Traced]) -> Iterator[dict[str, Any]]:
    origin = min((start for trace in traces for _, _, start, _ in trace.intervals), default=0)
    found = {_lane(part) for trace in traces for _, part, _, _ in trace.intervals}
    lanes = [lane for lane in LANES if lane in found] + sorted(found - set(LANES))
    for trace in sorted(traces, key=lambda trace: trace.rank):
        yield from _names(trace.rank, lanes)
        sizes = {step: (tokens, decodes) for step, tokens, decodes, *_ in trace.steps}
        for step, part, start, end in trace.intervals:
            yield {
                "name": f"step {step}" if part in ("step", "device") else part,
                "ph": "X",
                "pid": trace.rank,
                "tid": lanes.index(_lane(part)),
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
                "args": _args(step, part, sizes.get(step)),
            }


def _about(traces: Sequence[Traced]) -> dict[str, Any]:
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "ranks": sorted(trace.rank for trace in traces),
            "steps": sorted({step for trace in traces for step, *_ in trace.intervals}),
        },
    }


def _lane(part: str) -> str:
    return "host" if part in _HOST else part


def _args(step: int, part: str, size: tuple[int, int] | None) -> dict[str, int]:
    if part not in ("step", "device") or size is None:
        return {"step": step}
    return {"step": step, "tokens": size[0], "decodes": size[1]}


def _names(rank: int, lanes: Sequence[str]) -> list[dict[str, Any]]:
    def meta(what: str, tid: int, key: str, value: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": {key: value}}

    named = [
        meta("process_name", 0, "name", f"rank {rank}"),
        meta("process_sort_index", 0, "sort_index", rank),
    ]
    for tid, lane in enumerate(lanes):
        named.append(meta("thread_name", tid, "name", lane))
        named.append(meta("thread_sort_index", tid, "sort_index", tid))
    return named
