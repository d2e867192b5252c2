"""Loads and rebalancing over HTTP, on a scripted engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from crossdock.balance import parse_loads
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
    ("route", "body", "param"),
    [
        ("load", {"action": "begin"}, "action"),
        ("load", {}, "action"),
        ("rebalance", {"policy": "best"}, "policy"),
        ("rebalance", {"when": "now"}, "when"),
    ],
)
def test_a_body_that_asks_for_nothing_known_is_refused(server, route, body, param):
    response = server.http.post(f"/v1/experts/{route}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


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
    assert asked == ["eplb", None]


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
