"""Timelines over HTTP, on a scripted engine and on a real one."""

import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from crossdock import LLM
from crossdock.core import Busy
from crossdock.core.messages import Traced

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


@pytest.mark.parametrize(
    ("body", "param"),
    [({"steps": 0}, "steps"), ({"steps": 501}, "steps"), ({"timeout_s": 0}, "timeout_s"),
     ({"lanes": 3}, "lanes")],
)  # fmt: skip
def test_a_body_that_cannot_be_is_refused(server, body, param):
    response = server.http.post("/v1/trace", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_steps_and_timeout_reach_the_engine_and_idleness_is_told(server):
    asked = []

    def act(steps, timeout):
        asked.append((steps, timeout))
        return [Traced(0, 1, ((3, "experts", 0, 1000),) if steps == 2 else ())]

    server.client.traces.act = act
    response = server.http.post("/v1/trace", json={"steps": 2})
    assert response.json()["otherData"]["steps"] == [3]
    assert "content-length" not in response.headers  # it comes in pieces, as it is written
    response = server.http.post("/v1/trace", json={"timeout_s": 1.5})
    assert response.status_code == 409 and "1.5 s" in response.json()["error"]["message"]
    assert server.http.post("/v1/trace").status_code == 409
    assert asked == [(2, 30.0), (10, 1.5), (10, 30.0)]

    def busy(steps, timeout):
        raise Busy("tracing already")

    server.client.traces.act = busy
    assert server.http.post("/v1/trace", json={}).status_code == 409


def lanes_of(document):
    """`{(rank, lane): [(start, end, name, step)]}` in us, in order."""
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            span = (e["ts"], e["ts"] + e["dur"], e["name"], e["args"]["step"])
            found[e["pid"], names[e["pid"], e["tid"]]].append(span)
    return {key: sorted(spans) for key, spans in found.items()}


def test_steps_are_traced_while_requests_are_served(serve):
    # Where the start finds that overlap pays, exchanges are in two pieces and batches in halves.
    settings = {"ranks": 2, "device": "cpu", "invariant": True, "overlap": "off"}
    with (
        LLM(str(STORYTELLER), **settings) as llm,
        serve(llm.client, served_model_name="storyteller") as server,
    ):

        def write(count):
            body = {"model": "storyteller", "prompt": ["Once upon a time"] * count,
                    "max_tokens": 40, "temperature": 0, "ignore_eos": True}  # fmt: skip
            choices = server.http.post("/v1/completions", json=body).json()["choices"]
            return [choice["text"] for choice in choices]

        alone = write(3)
        answers: dict[str, object] = {}
        asking = threading.Thread(
            target=lambda: answers.update(
                server.http.post("/v1/trace", json={"steps": 12, "timeout_s": 60}).json()
            )
        )
        asking.start()
        while asking.is_alive():  # a trace waits for requests, which come meanwhile
            assert write(3) == alone
        asking.join()
        steps = answers["otherData"]["steps"]
        assert len(set(steps)) == 12
        assert answers["otherData"]["ranks"] == [0, 1]
        lanes = lanes_of(answers)
        parts = ("attention", "router", "dispatch", "experts", "shared", "combine")
        layers = len(llm.client.spec.moe_layers)
        for rank in (0, 1):
            host = [span for span in lanes[rank, "host"] if span[2] == f"step {span[3]}"]
            assert [span[3] for span in host] == steps
            whole = {span[3]: span for span in host}
            for part in parts:
                spans = lanes.get((rank, part), [])
                for start, end, name, step in spans:
                    assert name == part
                    assert whole[step][0] <= start <= end <= whole[step][1]
                assert all(a[1] <= b[0] for a, b in pairwise(spans))
            assert len(lanes[rank, "experts"]) == layers * 12
        # On one clock: no rank leaves a combine before the other has entered it.
        both = zip(lanes[0, "combine"], lanes[1, "combine"], strict=True)
        assert all(a[0] <= b[1] and b[0] <= a[1] for a, b in both)
        assert (0, "device") not in lanes  # on a CPU there is none
        idle = server.http.post("/v1/trace", json={"timeout_s": 0.1})
        assert idle.status_code == 409 and idle.json()["error"]["code"] == "idle"
        assert write(3) == alone
