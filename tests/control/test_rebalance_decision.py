"""When to move: gain against cost, threshold, hysteresis, interval, backoff."""

from dataclasses import replace

import numpy as np
import pytest

from crossdock.balance import Answer, imbalance, linear_placement, split
from crossdock.control import (
    History,
    Question,
    Reading,
    Window,
    decide,
    enough,
    judged,
    moved,
    propose,
)
from crossdock.control.expert_time import rank_time
from crossdock.core import ConfigError, EngineConfig
from crossdock.core.messages import Snapshot

RANKS, EXPERTS, LAYERS = 4, 16, 3
CONFIG = EngineConfig(model="m", ranks=RANKS, rebalance="auto", rebalance_interval_s=60)
PLACEMENT = linear_placement(LAYERS, EXPERTS, RANKS, 4)
BYTES = 1 << 20


def window(load_LE, busy=1.0, share=0.5):
    load_LP = np.take_along_axis(load_LE, PLACEMENT.slot_expert_LP, axis=1)
    rank_LR = load_LP.reshape(len(load_LE), RANKS, -1).sum(axis=2)
    return Window(load_LE, rank_LR, 100, 10.0, 10.0 * busy, share)


def skewed(times=20):
    """Rank 0 holds all that is popular."""
    load_LE = np.full((LAYERS, EXPERTS), 100)
    load_LE[:, :4] *= times
    return load_LE


def ask(seen, history=History(), now=1000.0, config=CONFIG, nbytes=BYTES):  # noqa: B008
    """The plan to move to, or None; and why."""
    decision = decide(Question(seen, PLACEMENT, config, history, nbytes, now))
    return decision.plan if decision.move else None, decision.why


def plan_of(seen, policy, config=CONFIG):
    question = Question(seen, PLACEMENT, config, History(), BYTES, 0.0)
    return propose(question, policy, weigh=False)


def test_a_plan_says_what_it_moves_and_gains():
    plan, why = ask(window(skewed()))
    assert plan is not None and "gained" in why
    after = imbalance(skewed(), Answer(plan.slot_expert_LP), RANKS)
    before = imbalance(skewed(), Answer(PLACEMENT.slot_expert_LP), RANKS)
    np.testing.assert_allclose(plan.imbalance_after, after)
    np.testing.assert_allclose(plan.imbalance_before, before)
    assert plan.gain == pytest.approx(before.sum() / after.sum() - 1)
    # Steps run all the time, half of it in experts: ten intervals of 60 s.
    assert plan.gain_s == pytest.approx(300 * (1 - after.sum() / before.sum()))
    changed = int((plan.slot_expert_LP != PLACEMENT.slot_expert_LP).sum())
    assert plan.moves == changed and plan.moved_bytes == changed * BYTES
    assert plan.cost_s == pytest.approx(changed * BYTES / 1e9)


def test_nothing_moves_under_the_threshold_or_where_it_does_not_pay():
    even = window(np.full((LAYERS, EXPERTS), 100))
    lenient = replace(CONFIG, rebalance_threshold=1.0)
    assert "under 2.000" in ask(even, config=replace(CONFIG, rebalance_threshold=2.0))[1]
    level = imbalance(even.load_LE, Answer(PLACEMENT.slot_expert_LP), RANKS).mean()
    assert (
        f"the imbalance is {level:.3f}"
        in ask(even, config=replace(CONFIG, rebalance_threshold=level + 0.1))[1]
    )
    for seen in (window(skewed(), busy=0.0), window(skewed(), share=0.0)):
        assert ask(seen, config=lenient)[0] is None  # nobody waits for experts
    dear = History(cost_per_byte=1.0)
    assert ask(window(skewed()), dear)[0] is None
    assert ask(window(skewed()), replace(dear, cost_per_byte=1e-12))[0] is not None


def test_a_dearer_move_moves_less():
    rng = np.random.default_rng()
    seen = window(rng.integers(100, 3000, (LAYERS, EXPERTS)))
    config = replace(CONFIG, rebalance_threshold=1.0)
    bytes_moved = [
        0 if plan is None else plan.moved_bytes
        for plan, _ in (
            ask(seen, History(cost_per_byte=cost), config=config) for cost in (1e-9, 3e-6, 1e-2)
        )
    ]
    assert bytes_moved[0] >= bytes_moved[1] >= bytes_moved[2] == 0 < bytes_moved[0]


def test_interval_and_hysteresis_hold_back_a_second_move():
    plan, _ = ask(window(skewed()))
    history = moved(History(), plan, 1000.0, lost_s=plan.moved_bytes * 2e-9, ok=True)
    assert history.seconds_per_byte == pytest.approx(2e-9)
    assert "59 s ago, of 60" in ask(window(skewed()), history, 1059.0)[1]
    assert ask(window(skewed()), history, 1061.0)[0] is not None
    # As unbalanced as the last move was to leave it, and a little more: not again.
    level = float(np.mean(ask(window(skewed()))[0].imbalance_before))
    calm = replace(history, floor=level - 0.04)
    assert f"under {level + 0.01:.3f}" in ask(window(skewed()), calm, 1061.0)[1]
    assert ask(window(skewed()), replace(calm, floor=level - 0.06), 1061.0)[0] is not None


def test_moves_that_fail_or_disappoint_come_ever_more_rarely():
    plan, _ = ask(window(skewed()))
    history = History()
    for wanted in (2, 4, 8, 16, 16):
        history = moved(history, plan, 1000.0, 0.0, ok=False)
        assert history.backoff == wanted and history.cost_per_byte is None
    assert ask(window(skewed()), history, 1000.0 + 15 * 60)[0] is None
    assert ask(window(skewed()), history, 1000.0 + 17 * 60)[0] is not None
    assert judged(history, 0.5, 0.25).backoff == 1
    assert judged(History(), 0.5, 0.24).backoff == 2


def test_costs_are_averaged_and_never_believed_to_be_nothing():
    plan, _ = ask(window(skewed()))
    history = moved(History(), plan, 0.0, plan.moved_bytes * 4e-9, ok=True)
    history = moved(history, plan, 0.0, 0.0, ok=True)
    assert history.seconds_per_byte == pytest.approx(2e-9)
    assert moved(History(), plan, 0.0, 0.0, ok=True).seconds_per_byte == pytest.approx(1e-10)


def test_shares_count_where_replicas_are_chosen_by_quota():
    """Ranks 0 and 3 hold expert 0; rank 0 has expert 4 besides, so rank 3 should take more."""
    load_LE = np.full((LAYERS, EXPERTS), 10)
    load_LE[:, 0], load_LE[:, 4] = 150, 60
    uneven, seen = replace(CONFIG, replica_choice="quota"), window(load_LE)
    by_hash, by_quota = (plan_of(seen, "sticky", config) for config in (CONFIG, uneven))
    assert by_quota.imbalance_before[0] < by_hash.imbalance_before[0]
    for policy in ("sticky", "eplb", "quota", "llep"):
        plan = plan_of(seen, policy, uneven)
        want = imbalance(load_LE, split(plan.slot_expert_LP, load_LE, RANKS), RANKS)
        assert plan.imbalance_after == pytest.approx(want.tolist())
        assert plan.imbalance_after[0] <= by_quota.imbalance_before[0] + 1e-9


@pytest.mark.parametrize("policy", ["sticky", "eplb"])
def test_every_policy_proposes_what_every_expert_has_a_slot_in(policy):
    plan = plan_of(window(skewed()), policy)
    replace(PLACEMENT, slot_expert_LP=plan.slot_expert_LP).replicas(0)
    assert plan.policy == policy and plan.gain > 0
    with pytest.raises(ConfigError, match="'hash' expected one of sticky, eplb"):
        plan_of(window(skewed()), "quota")


def test_a_window_is_the_difference_of_two_readings():
    def snapshots(scale):
        return [
            Snapshot(
                rank,
                {
                    "expert_tokens": [[scale, 2 * scale], [0, scale * (rank + 1)]],
                    "slot_tokens": [[scale, scale], [rank * scale, 0]],
                    "calls": {"step": 10 * scale + rank},
                    "seconds": {"step": 2.0 * scale, "experts": 0.5 * scale * (rank + 1)},
                },
            )
            for rank in range(2)
        ]

    seen = Window.between(Reading.of(5.0, snapshots(1)), Reading.of(25.0, snapshots(4)))
    assert seen.load_LE.tolist() == [[6, 12], [0, 9]]
    assert seen.rank_LR.tolist() == [[6, 6], [0, 3]]
    assert (seen.steps, seen.seconds, seen.step_s) == (30, 20.0, 6.0)
    assert seen.expert_share == pytest.approx(0.5)
    assert seen.balancedness == pytest.approx((6 + 1.5) / (6 + 3))
    assert not enough(seen) and enough(window(skewed()))
    assert Window.between(Reading.of(0.0, snapshots(1)), Reading.of(1.0, snapshots(1))
                          ).balancedness is None  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("rebalance_threshold", 0.9, "at least 1"),
        ("rebalance_threshold", float("nan"), "at least 1"),
        ("rebalance_interval_s", 0, "above 0"),
        ("rebalance_policy", "lp", "one of sticky, eplb, quota, llep"),
        ("rebalance", "on", "one of off, manual, auto"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, what):
    with pytest.raises(ConfigError, match=f"{name} must be {what}"):
        EngineConfig(model="m", **{name: value})


def test_policies_of_uneven_shares_need_a_choice_by_quota():
    assert EngineConfig(model="m", rebalance_policy="quota", replica_choice="quota")
    with pytest.raises(ConfigError, match='"llep" needs replica_choice = "quota"'):
        EngineConfig(model="m", rebalance_policy="llep")


def test_experts_with_few_rows_take_the_time_of_reading_them():
    """Two ranks of two slots. A hundred steps of up to 4 tokens, ten of up to 64: 400 of 1,040
    tokens go in the small ones."""
    load_LE = np.array([[2080, 1040, 104, 0]])
    seen = Window(load_LE, np.zeros((1, 2)), 110, 1.0, 1.0, 0.5, (0, 0, 100, 0, 0, 0, 10))
    assert seen.sizes == ((100, 400 / 1040), (10, 640 / 1040))
    small, large = rank_time(seen, Answer(np.array([[0, 1, 2, 3]])), 2, read_rows=20.0)
    # Rows of a small step: 8, 4, 0.4, 0; of a large one: 128, 64, 6.4, 0.
    read = [20 * (1 - np.exp(-rows)) for rows in (8, 4, 0.4, 6.4)]
    np.testing.assert_allclose(small, [[100 * (read[0] + read[1]), 100 * read[2]]])
    np.testing.assert_allclose(large, [[10 * (128 + 64), 10 * read[3]]])
    by_rows = rank_time(seen, Answer(np.array([[0, 2, 1, 3]])), 2, read_rows=0.0)
    np.testing.assert_allclose(by_rows.sum(axis=0), [[2080 + 104, 1040]])
    unknown = replace(seen, sizes_N=())
    assert unknown.sizes == ((110, 1.0),)


def test_prompts_are_worth_a_move_that_decodes_are_not():
    cost = History(cost_per_byte=1e-6)
    load_LE = 10 * skewed(times=5)  # in a step 2,500 and 500 rows, or 50 and 10
    prompts = replace(window(load_LE), sizes_N=(0,) * 13 + (2,))
    decodes = replace(window(load_LE), sizes_N=(0,) * 8 + (100,))
    plans = {}
    for name, seen in (("prompts", prompts), ("decodes", decodes)):
        question = Question(seen, PLACEMENT, CONFIG, cost, BYTES, 1000.0, read_rows=200.0)
        decision = decide(question)
        assert decision.move == (name == "prompts"), decision.why
        plans[name] = propose(question, "eplb", weigh=False)
    # Balanced as well in either case, which is worth little where weights are read all the same.
    gain = plans["prompts"].gain
    assert gain == pytest.approx(plans["decodes"].gain) and gain > 0.3
    assert plans["prompts"].left == pytest.approx(1 / (1 + gain))
    assert plans["decodes"].left > 0.99


def test_readings_tell_the_sizes_of_steps():
    def reading(time, counts):
        values = {
            "expert_tokens": [[1, 2]], "slot_tokens": [[1]], "calls": {}, "seconds": {},
            "histograms": {"iteration_tokens": {"counts": counts, "sum": 0.0, "bounds": []}},
        }  # fmt: skip
        return Reading.of(time, [Snapshot(0, values)])

    seen = Window.between(reading(0.0, [1, 5, 0]), reading(1.0, [1, 7, 2]))
    assert seen.sizes_N == (0, 2, 2) and seen.sizes == ((2, 4 / 12), (2, 8 / 12))
