"""The child of `bench engine` that runs our engine; started by `python -m`."""

import time
from typing import Any

from crossdock.bench.child import answer_requests
from crossdock.bench.step_phases import first_steps, phases
from crossdock.core import SamplingParams
from crossdock.launch import LLM
from crossdock.metrics.timeline import timeline

TIMELINE_STEPS = 40


def start(settings: dict[str, Any]) -> tuple[LLM, dict[str, Any]]:
    llm = LLM(**settings)
    return llm, {"ranks": llm.client.info}


def run(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    """Seconds and output tokens of `prompts`, and what the ranks spent on each part meanwhile; with
    `traced_steps` also their phases, and the first steps as a timeline if `timeline`."""
    length = request["output_len"]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    before = _totals(llm)
    if "traced_steps" in request:
        llm.client.traces.start(request["traced_steps"])
    begin = time.perf_counter()
    outputs = llm.generate(request["prompts"], params)
    seconds = time.perf_counter() - begin
    traced = _traced(llm, request) if "traced_steps" in request else {}
    after = _totals(llm)
    return {
        **traced,
        "seconds": seconds,
        "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "parts": [_since(b, a) for b, a in zip(before, after, strict=True)],
        "rss_bytes": [rank["rss_bytes"] for rank in after],
    }


def _traced(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    traces = llm.client.traces.result(timeout=0.0)
    answer: dict[str, Any] = {"phases": phases(traces)}
    if request["timeline"]:
        answer["timeline"] = timeline([first_steps(trace, TIMELINE_STEPS) for trace in traces])
    return answer


def _totals(llm: LLM) -> list[dict[str, Any]]:
    return [s.values for s in llm.client.snapshots(timeout=10.0)]


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of one rank: seconds and calls of each part, and its counters, since `before`."""
    return {
        what: {part: value - before[what].get(part, 0) for part, value in after[what].items()}
        for what in ("seconds", "calls", "counters")
    }


if __name__ == "__main__":
    answer_requests(start, run, lambda llm: llm.close())
