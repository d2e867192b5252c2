"""`bench balance`: what its figures are computed from, on small cases."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from crossdock.balance import POLICIES, Answer, Problem, imbalance, linear_placement
from crossdock.bench import balance as bench
from crossdock.bench.balance_loads import drifting_loads
from crossdock.bench.balance_table import render
from crossdock.bench.report import write_document
from crossdock.core import ConfigError


def named(cases, name, **shape):
    return [c for c in cases if c.name == name and shape.items() <= c.shape.items()]


def test_a_whole_run(tmp_path):
    options = bench.BalanceOptions((16,), seeds=2, tokens=64, layers=1, windows=2, repeats=1)
    said = []
    cases = bench.run_balance(options, said.append)
    report = bench.report(options, cases, "crossdock bench balance")
    path = tmp_path / "balance.json"
    write_document(report.document(), path)
    document = json.loads(path.read_text())
    assert {case["name"] for case in document["cases"]} == {
        "eplb_planning",
        "eplb_planning_processor",
        "small_fullest_rank",
        "generator_imbalance",
        "choice_imbalance",
        "reroute",
        "drift_imbalance",
        "sticky_improvement_over_eplb",
        "sticky_moves_over_eplb",
    }
    assert all(case["reached"] is not None for case in document["cases"] if case["target"])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(report))
    shown = console.export_text()
    for policy in POLICIES:
        assert policy in shown
    assert any("16 ranks" in line for line in said)


def test_a_part_of_it_is_measured_alone():
    options = bench.BalanceOptions(
        (8,), seeds=1, tokens=16, repeats=1, measure=("small", "reroute")
    )
    said = []
    names = {case.name for case in bench.run_balance(options, said.append)}
    assert names == {"small_fullest_rank", "reroute"} and len(said) == 2
    with pytest.raises(ConfigError, match="--measure 'rerout': expected some of planning, small"):
        bench.run_balance(replace(options, measure=("small", "rerout")), said.append)


def test_small_cases_name_the_optimum_and_nothing_equal_beats_it():
    cases = bench.small_cases(3)
    for case in ("EPLB README", "FlashLB", "random"):
        (best,) = named(cases, "small_fullest_rank", case=case, policy="optimal")
        for policy in ("eplb", "sticky"):
            (other,) = named(cases, "small_fullest_rank", case=case, policy=policy)
            for ours, least in zip(other.more["values"], best.more["values"], strict=True):
                assert ours >= least * (1 - 1e-9)
    (toy,) = named(cases, "small_fullest_rank", case="FlashLB", policy="optimal")
    assert toy.median == pytest.approx(196.667, abs=1e-3)
    for policy in ("quota", "sticky"):
        (toy,) = named(cases, "small_fullest_rank", case="FlashLB", policy=policy)
        assert toy.reached


def test_generated_loads_start_at_their_ratio_and_count_from_home():
    cases = bench.generated(ranks=64, ratio=2.0, seeds=2, tokens=512)
    (quota,) = named(cases, "generator_imbalance", policy="quota")
    assert quota.more["before"] == pytest.approx(2.0, rel=0.03)
    assert quota.median == pytest.approx(np.mean(quota.more["values"]))
    assert quota.more["moves"] == quota.more["replicas"]  # each replica is one expert moved
    (replicas,) = named(cases, "generator_replicas")
    assert replicas.median == quota.more["replicas"] and replicas.target == 49
    (eplb,) = named(cases, "generator_imbalance", policy="eplb")
    assert eplb.more["replicas"] == 128


def test_drift_is_planned_on_one_window_and_scored_on_the_next():
    loads = drifting_loads(2, 32, 4, 0.2, 20_000, seed=int(np.random.default_rng().integers(1e6)))
    assert all(load_LE.sum(axis=1).tolist() == [20_000] * 2 for load_LE in loads)
    cases = bench.drifting({"loads": "drift 0.2"}, loads, ranks=8, redundant=8)
    (eplb,) = named(cases, "drift_imbalance", policy="eplb")
    expected = [
        imbalance(after, POLICIES["eplb"](Problem(before, 8, 5)), 8).mean()
        for before, after in pairwise(loads)
    ]
    assert eplb.more["values"] == pytest.approx(expected)
    start = Answer(linear_placement(2, 32, 8, 8).slot_expert_LP)
    stays = np.mean([imbalance(load_LE, start, 8).mean() for load_LE in loads[1:]])
    assert eplb.more["before"] == pytest.approx(stays)
    (sticky,) = named(cases, "drift_imbalance", policy="sticky")
    part = named(cases, "sticky_improvement_over_eplb")[0]
    assert part.median == pytest.approx((stays - sticky.median) / (stays - eplb.median))
    (moves,) = named(cases, "sticky_moves_over_eplb")
    assert moves.median == pytest.approx(sticky.more["moves"] / eplb.more["moves"])
