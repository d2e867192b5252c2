"""Expert loads, real balance policies on them, and steps priced by the cost model."""

from dataclasses import replace

import numpy as np
import pytest

from crossdock.balance import POLICIES, Answer, Problem
from crossdock.core import ConfigError
from crossdock.planner.cost import StepModel
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import load_hardware
from crossdock.planner.layout import Layout
from crossdock.planner.simulate import (
    KVLink,
    Pool,
    PricedSteps,
    Rebalance,
    SimConfig,
    StepLoad,
    loads_from_counts,
    poisson,
    simulate,
    zipf_loads,
)
from crossdock.planner.simulate.experts import inclusion_of, moves_into

FP8 = "float8_e4m3fn"


def step_time(layout, load):
    return 0.01 + 2e-5 * load.total_tokens / layout.gpus * load.imbalance


def config(experts, rebalance=None, step=step_time, seconds=20.0, **layout):
    layout = Layout("both", 8, redundant_per_rank=1, **layout)
    return SimConfig(
        poisson(30, seconds, isl=400, osl=20, seed=1),
        (Pool(layout, 100_000),),
        step,
        experts=experts,
        rebalance=rebalance,
    )


def eplb(interval_s=2.0, bytes_per_s=1e15):
    return Rebalance(POLICIES["eplb"], interval_s, expert_bytes=1000, bytes_per_s=bytes_per_s)


def test_inclusion_probabilities_are_those_of_draws_without_replacement():
    weight_E = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    expected_E = inclusion_of(weight_E, 3)
    assert expected_E.sum() == pytest.approx(3)
    rng = np.random.default_rng(0)
    p_E = weight_E / weight_E.sum()
    draws = [rng.choice(8, 3, replace=False, p=p_E) for _ in range(20_000)]
    assert expected_E == pytest.approx(np.bincount(np.concatenate(draws)) / 20_000, abs=0.03)


def test_measured_counts_are_taken_as_they_are():
    load_LE = np.random.default_rng(1).integers(1, 100, (3, 16))
    inclusion_WLE = loads_from_counts(load_LE, 2).inclusion_WLE
    assert inclusion_WLE[0] == pytest.approx(2 * load_LE / load_LE.sum(1, keepdims=True))
    with pytest.raises(ConfigError, match=r"90\.0% of its layer's load; with top-2"):
        loads_from_counts(np.array([[90, 5, 5]]), 2)
    with pytest.raises(ConfigError, match="none all 0"):
        loads_from_counts(np.zeros((2, 4)), 2)


def test_skewed_loads_are_slower_and_rebalancing_makes_up_for_it():
    even = simulate(config(zipf_loads(3, 32, 4, 0.0)))
    skewed_loads = zipf_loads(3, 32, 4, 1.0)
    skewed = simulate(config(skewed_loads))
    balanced = simulate(config(skewed_loads, eplb()))
    # In order, experts that are equally popular are not even: eight of them have two slots.
    for better in (even, balanced):
        assert 1 <= better.pools["both"].imbalance < 0.85 * skewed.pools["both"].imbalance
        assert better.ttft_s.mean < skewed.ttft_s.mean
    assert balanced.pools["both"].rebalances == pytest.approx(10, abs=1)
    assert balanced.pools["both"].moved_bytes > 0
    assert skewed.pools["both"].rebalances == 0


def test_a_placement_is_only_as_good_as_its_loads_are_fresh():
    drifting = zipf_loads(3, 32, 4, 1.0, windows=10, window_s=2.0, drift=0.5)
    often, late = (simulate(config(drifting, eplb(interval_s=s))) for s in (0.5, 8.0))
    assert often.pools["both"].imbalance < late.pools["both"].imbalance


def test_a_placement_holds_once_its_moves_are_done():
    loads = zipf_loads(3, 32, 4, 1.0)
    quick, slow, never = (
        simulate(config(loads, eplb(2.0, bytes_per_s))).pools["both"]
        for bytes_per_s in (1e12, 2e3, 1e-3)
    )
    assert quick.imbalance < slow.imbalance < never.imbalance
    assert never.rebalances == 1  # the second waits for the first
    without = simulate(config(loads)).pools["both"]
    assert never.imbalance == pytest.approx(without.imbalance, rel=0.02)


def test_a_policy_sees_the_loads_since_the_last_time():
    seen = []

    def keep(problem: Problem) -> Answer:
        seen.append(problem)
        return Answer(problem.current_LP)

    loads = zipf_loads(2, 16, 2, 0.8, windows=2, window_s=10.0, drift=1.0)
    result = simulate(config(loads, replace(eplb(5.0), policy=keep)))
    assert len(seen) in (3, 4)
    assert result.pools["both"].moved_bytes == 0
    for problem, window in zip(seen, (0, 0, 1), strict=False):
        share_LE = problem.load_LE / problem.load_LE.sum(1, keepdims=True)
        assert share_LE == pytest.approx(loads.inclusion_WLE[window] / 2, abs=0.01)
        assert (problem.num_ranks, problem.slots_per_rank) == (8, 3)


def test_moves_count_experts_that_a_rank_lacked():
    rng = np.random.default_rng(2)
    old, new = (rng.integers(-1, 12, (4, 5 * 3)) for _ in range(2))
    expected = [
        sum(
            len(set(new[layer, 3 * r : 3 * r + 3]) - set(old[layer, 3 * r : 3 * r + 3]) - {-1})
            for layer in range(4)
        )
        for r in range(5)
    ]
    assert moves_into(old, new, 5).tolist() == expected


def uniform(groups, decodes, context, imbalance=1.0):
    ones = np.ones(groups)
    return StepLoad(
        decodes * ones, decodes * context * ones, 0 * ones, 0 * ones, groups * decodes, imbalance
    )


@pytest.mark.parametrize("overlap", ["off", "sbo", "tbo"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_even_decode_step_costs_what_the_cost_model_says(overlap, tp):
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")
    layout = Layout("decode", 32, tp=tp, overlap=overlap, weights_dtype=FP8, redundant_per_rank=1)
    priced = PricedSteps(spec, hardware)(layout, uniform(32 // tp, 128, 2000, 1.2))
    model = StepModel(spec, hardware, layout, "decode")
    even = model.seconds(128 / tp, 2000, 1.0)
    uneven = model.seconds(128 / tp, 2000, 1.2)
    assert even < priced <= uneven * (1 + 1e-9)
    assert priced == pytest.approx(uneven, rel=0.03)


def test_one_full_group_holds_up_all_but_does_not_fill_their_experts():
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")
    steps = PricedSteps(spec, hardware)
    layout = Layout("both", 32, weights_dtype=FP8, redundant_per_rank=1)
    decodes = uniform(32, 64, 2000)
    prefill_G = np.zeros(32)
    prefill_G[5] = 4000
    one = replace(
        decodes, prefill_G=prefill_G, pairs_G=prefill_G * 2000, total_tokens=32 * 64 + 4000
    )
    everywhere = replace(
        decodes,
        prefill_G=np.full(32, 4000.0),
        pairs_G=np.full(32, 8e6),
        total_tokens=32 * (64 + 4000),
    )
    assert steps(layout, decodes) < steps(layout, one) < steps(layout, everywhere)


def test_a_priced_deployment_runs_and_overlap_pays():
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")

    def run(overlap):
        prefill = Layout("prefill", 32, weights_dtype=FP8, redundant_per_rank=1, overlap=overlap)
        decode = Layout("decode", 64, weights_dtype=FP8, redundant_per_rank=1, mode="low_latency")
        return simulate(
            SimConfig(
                poisson(60, 15, isl=2000, osl=100, seed=3),
                (Pool(prefill, 100_000), Pool(decode, 400_000)),
                PricedSteps(spec, hardware),
                kv_link=KVLink(70272, 50e9, 1e-5),
                stand_for=8,
            )
        )

    off, tbo = run("off"), run("tbo")
    assert off.verdict == tbo.verdict == "steady"
    assert tbo.ttft_s.mean < off.ttft_s.mean
    assert 0.005 < tbo.tpot_s.mean < 0.1
