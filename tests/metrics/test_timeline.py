"""Traced steps as a document of the Trace Event Format."""

import json

from crossdock.core.messages import Traced
from crossdock.metrics.timeline import timeline, written


def test_ranks_are_processes_and_parts_are_lanes():
    traces = [
        Traced(1, 5, ((7, "experts", 3_000, 5_500), (8, "device", 9_000, 9_100))),
        Traced(0, 5, ((7, "step", 1_000, 9_000), (7, "agree", 1_500, 2_000), (7, "extra", 2, 3)),
               ((7, 40, 3, 0, 0),)),
    ]  # fmt: skip
    document = json.loads(json.dumps(timeline(traces)))
    events = document["traceEvents"]
    assert document["otherData"] == {"ranks": [0, 1], "steps": [7, 8]}
    lanes = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    for rank in (0, 1):
        order = [lanes[rank, lane] for lane in ("host", "device", "experts", "extra")]
        assert order == sorted(order)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    seen = {
        (e["pid"], e["name"]): (e["tid"], e["ts"], e["dur"], e["args"])
        for e in events
        if e["ph"] == "X"
    }
    assert seen[1, "experts"] == (lanes[1, "experts"], 2.998, 2.5, {"step": 7})
    sized = {"step": 7, "tokens": 40, "decodes": 3}
    assert seen[0, "step 7"] == (lanes[0, "host"], 0.998, 8.0, sized)
    assert seen[0, "agree"][0] == lanes[0, "host"]
    assert seen[1, "step 8"][0] == lanes[1, "device"]
    assert min(ts for _, ts, _, _ in seen.values()) == 0


def test_it_is_written_in_small_pieces():
    # As many intervals as a step of 94 layers has, and more.
    rows = tuple((i // 940, "experts", 7 * i, 7 * i + 5) for i in range(5000))
    traces = [Traced(rank, 5, rows, ((2, 40, 3, 0, 0),)) for rank in (1, 0)]
    pieces = list(written(traces))
    assert max(map(len, pieces)) < 200_000
    assert json.loads("".join(pieces)) == timeline(traces)


def test_of_nothing_it_is_empty():
    assert timeline([Traced(0, 1, ())])["otherData"]["steps"] == []
    assert json.loads("".join(written([]))) == timeline([])
