"""Loads and rebalancing over HTTP, on a scripted engine."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossdock import LLM
from crossdock.balance import parse_loads, read_loads
from crossdock.cli.main import run
from crossdock.core import Busy, ConfigError, RankLost


def test_a_recording_is_started_dumped_and_stopped(server):
    def act(action):
        return server.http.post("/v1/experts/load", json={"action": action})

    assert act("dump").status_code == 400
    assert act("start").json() == {"recording": True, "windows": 0}
    loads = parse_loads(act("dump").json(), "the answer")
    assert loads.load_WLE.tolist() == [[[1, 2, 3, 4]]] and loads.steps_W.tolist() == [3]
    assert act("reset").json()["recording"] is True
    assert act("stop").json() == {"recording": False, "windows": 0}
    assert server.client.recording.asked == ["start", "reset", "stop"]


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        ("load", {"action": "begin"}, "action", "unknown value 'begin'; expected one of 'start',"),
        ("load", {}, "action", "is required"),
        ("rebalance", {"policy": "best"}, "policy", "unknown value 'best'; expected one of "),
        ("rebalance", {"when": "now"}, "when", "unknown field"),
    ],
)
def test_a_body_that_asks_for_nothing_known_is_refused(server, route, body, param, words):
    response = server.http.post(f"/v1/experts/{route}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_rebalance_answers_with_its_plan(server):
    plan = SimpleNamespace(
        policy="eplb",
        slot_expert_LP=np.array([[1, 0, 2, 3]]),
        imbalance_before=(1.5,),
        imbalance_after=(1.25,),
        gain=0.2,
        moves=2,
    )
    asked = []

    def act(policy):
        asked.append(policy)
        return SimpleNamespace(
            result="moved", why="asked for", plan=plan, moved_bytes=64, seconds=0.5
        )

    server.client.balancer.act = act
    answer = server.http.post("/v1/experts/rebalance", json={"policy": "eplb"}).json()
    assert answer == {
        "result": "moved", "why": "asked for", "moved_bytes": 64, "seconds": 0.5,
        "policy": "eplb", "imbalance_before": [1.5], "imbalance_after": [1.25],
        "predicted_gain": 0.2, "moves": 2, "placement": [[1, 0, 2, 3]],
    }  # fmt: skip
    server.http.post("/v1/experts/rebalance", json={})
    assert server.http.post("/v1/experts/rebalance").status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl's, of -d ''
    empty = server.http.post("/v1/experts/rebalance", content=b"", headers=form)
    assert empty.status_code == 200
    assert asked == ["eplb", None, None, None]
    assert server.http.post("/v1/experts/load").status_code == 400


@pytest.mark.parametrize(
    ("error", "status"), [(Busy("moving"), 409), (ConfigError("off"), 400), (RankLost("gone"), 503)]
)
def test_what_cannot_be_is_told(server, error, status):
    def act(policy):
        raise error

    server.client.balancer.act = act
    response = server.http.post("/v1/experts/rebalance", json={})
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


def metric(http, name):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"crossdock:{name}"
    }


def test_a_running_engine_is_recorded_and_rebalanced(serve, tmp_path, monkeypatch, capfd):
    settings = {"rebalance": "manual", "redundant_experts": 4, "invariant": True}
    with (
        LLM(str(STORYTELLER), ranks=2, device="cpu", **settings) as llm,
        serve(llm.client, served_model_name="storyteller") as server,
    ):

        def write(_=None):
            body = {"model": "storyteller", "prompt": ["Once upon a time"] * 2, "max_tokens": 16,
                    "temperature": 0, "ignore_eos": True, "logprobs": 2}  # fmt: skip
            return server.http.post("/v1/completions", json=body).json()["choices"]

        # Whoever records waits for a window to pass; here that is when requests come.
        monkeypatch.setattr("crossdock.cli.balance_record.sleep", write)
        out = tmp_path / "loads.json"
        flags = ["--record", server.url, "--windows", "2", "--out", str(out), "--ranks", "2"]
        assert run(["balance", *flags, "--redundant", "4", "--json"]) == 0
        plan, loads = json.loads(capfd.readouterr().out), read_loads(out)
        assert loads.load_WLE.shape == (2, 4, 32) and plan["windows"] == 2
        state = llm.client.recording.state()
        assert state == {"recording": False, "windows": 0}  # each was sent once, and none is kept
        tokens = loads.load_WLE.sum(axis=2)
        assert (tokens == tokens[:, :1]).all() and tokens.min() > 0
        assert loads.expert_bytes == llm.client.expert_bytes == 3 * 320 * 32 * 4

        before = write()
        answer = server.http.post("/v1/experts/rebalance", json={"policy": "eplb"}).json()
        assert answer["result"] == "moved", answer
        assert answer["placement"] == llm.client.placement.slot_expert_LP.tolist()
        assert write() == before
        assert metric(server.http, "rebalance_total")["moved",] == 1
        moved = metric(server.http, "rebalance_moved_bytes_total")[()]
        assert moved == answer["moved_bytes"] == answer["moves"] * loads.expert_bytes
        assert metric(server.http, "rebalance_seconds_count")[()] == 1
        gain = metric(server.http, "rebalance_predicted_gain")[()]
        assert gain == pytest.approx(answer["predicted_gain"]) and gain > 0
        assert set(metric(server.http, "step_wait_seconds")) == {("0",), ("1",)}
