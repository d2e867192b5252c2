"""`bench balance --live` on a small load: every phase is there, and the figures fit together."""

import json
from pathlib import Path

import numpy as np
import pytest

from crossdock.bench.balance_live import crowded
from crossdock.cli.main import run

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


def test_the_popular_experts_are_put_together():
    placement = crowded(np.array([[3, 9, 1, 5], [1, 2, 3, 4]]), 6)
    assert placement.tolist() == [[1, 3, 0, 2, -1, -1], [3, 2, 1, 0, -1, -1]]


def test_a_run_balances_a_served_model(tmp_path, capfd):
    out = tmp_path / "live.json"
    flags = ["--requests", "6", "--lengths", "32:24", "--rounds", "2", "--device", "cpu"]
    assert run(["bench", "balance", "--live", str(STORYTELLER), *flags, "--out", str(out)]) == 0
    assert "live throughput, tokens/s" in capfd.readouterr().out
    cases = json.loads(out.read_text())["cases"]
    named = {}
    for case in cases:
        named.setdefault(case["name"], []).append(case)
        assert case["n"] == 2
    rates = {case["shape"]["phase"]: case["median"] for case in named["live_throughput"]}
    assert set(rates) == {"off", "moving", "auto"} and min(rates.values()) > 0
    gaps = {
        (case["shape"]["phase"], case["shape"]["percentile"]): case for case in named["live_itl"]
    }
    assert len(gaps) == 8 and gaps["off", 50]["gaps"] == gaps["off", 99]["gaps"]
    assert 2 * 6 * 12 < gaps["off", 50]["gaps"] <= 2 * 6 * 16
    assert gaps["moving", 50]["gaps"] > 0 and gaps["planning", 50]["gaps"] > 0
    for phase in ("off", "planning", "moving", "auto"):
        assert gaps[phase, 50]["median"] <= gaps[phase, 99]["median"]
    (before,) = named["live_imbalance_before"]
    (gain,) = named["live_balancedness_gain"]
    (said,) = named["live_balancedness_gain_predicted"]
    assert before["median"] > 1.2 and gain["median"] == pytest.approx(said["median"], abs=15)
    assert named["live_failed_requests"][0]["reached"] is True
    assert named["live_moved"][0]["median"] > 0


@pytest.mark.parametrize("lengths", ["32", "0:8", "8:1", "a:b", "8:8:8"])
def test_lengths_that_are_none_are_refused(lengths, capfd):
    assert run(["bench", "balance", "--live", "nowhere", "--lengths", lengths]) == 2
    assert "expected PROMPT:NEW" in capfd.readouterr().err
