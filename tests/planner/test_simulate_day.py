"""A daily load on real descriptions: capacities from the search, sizes that follow the load."""

import json

import pytest

from crossdock.core import ConfigError
from crossdock.planner import Question, Workload, answer_question, formats_of
from crossdock.planner.answer_day import document_day, simulate_day
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import load_hardware


@pytest.fixture(scope="module")
def answer():
    spec = load_model("qwen3-30b-a3b")
    work = Workload(isl=1000, osl=200, ttft_s=2.0, tpot_s=0.05)
    return answer_question(
        Question(
            model="qwen3-30b-a3b",
            spec=spec,
            hardware=load_hardware("h100"),
            work=work,
            formats=formats_of(spec, None, None),
            gpus=16,
            price=2.0,
        ),
        runners_up=0,
    )


def profile(path, rates, more=""):
    path.write_text(f"requests_per_s = {[round(r, 2) for r in rates]}\n{more}")
    return path


def test_a_day_is_served_by_whole_nodes_and_costs_less(answer, tmp_path):
    peak = 0.8 * answer.best.capacity
    rates = [peak * share for share in (0.1, 0.2, 0.5, 1.0, 0.9, 0.3)]
    shares = []
    day = simulate_day(answer, profile(tmp_path / "day.toml", rates), shares.append)
    assert shares == sorted(shares)
    assert set(day.capacity_of) == {8, 16}
    assert day.capacity_of[16] == pytest.approx(answer.best.capacity)
    assert set(day.result.fixed.sizes) == {16}
    assert day.result.fixed.cost == pytest.approx(2.0 * 16 * 24)
    assert set(day.result.following.sizes) == {8, 16}
    assert 0.15 < day.result.saved < 0.5
    assert json.loads(json.dumps(document_day(day)))["saved"] == day.result.saved


def test_a_peak_beyond_all_gpus_says_what_is_short(answer, tmp_path):
    day = profile(tmp_path / "day.toml", [2 * answer.best.capacity], "min_gpus = 16")
    with pytest.raises(ConfigError, match=r"needs a capacity of .*, and 16 GPUs have .*more GPUs"):
        simulate_day(answer, day)
