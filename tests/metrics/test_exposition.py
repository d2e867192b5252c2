"""The exposition on hand-made snapshots: it parses, and figures are those worked out by hand."""

import subprocess
import sys

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossdock.core.messages import Snapshot
from crossdock.metrics import GatewayMetrics, Recorder
from crossdock.metrics.exposition import Engine
from crossdock.metrics.rebalances import Rebalances


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def snapshot(rank, expert_tokens, slot_tokens, *, step=1.0, wait=0.0, prompt=0, output=0):
    recorder = Recorder()
    recorder.observe("step", step)
    recorder.observe("wait", wait)
    recorder.observe("dispatch", 1e-4)
    recorder.observe("dispatch", 3e-4 + rank)
    values = recorder.snapshot()
    values["scheduler"] = {
        "num_requests_running": 2 + rank,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25 + 0.5 * rank,
        "num_preemptions_total": 3,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "prompt_tokens_total": prompt,
        "generation_tokens_total": output,
    }
    values["expert_tokens"] = expert_tokens
    values["slot_tokens"] = slot_tokens
    values["all_to_all_bytes"] = {"self": 10, "node": 20 * rank, "remote": 0}
    values["moe_layers"] = [1, 3]
    return Snapshot(rank, values)


def figures(metrics):
    """`{(name, labels...): value}` of the exposition as prometheus_client reads it."""
    families = list(text_string_to_metric_families(metrics.expose().decode()))
    assert all(family.documentation for family in families)
    return {
        (sample.name.removeprefix("crossdock:"), *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def attached(snapshots, window=1000, clock=None):
    metrics = GatewayMetrics(clock=clock or Clock())
    metrics.attach(Engine(lambda: snapshots, ranks=2, top_k=2, load_window_tokens=window))
    return metrics


TWO = [
    snapshot(0, [[4, 0, 0, 0], [1, 1, 1, 1]], [[4, 2], [2, 2]]),
    snapshot(1, [[0, 2, 1, 1], [1, 1, 1, 1]], [[1, 1], [4, 0]]),
]


def test_sums_over_ranks_and_keeps_ranks_apart_where_asked():
    seen = figures(attached(TWO))
    assert seen["num_requests_running",] == 5
    assert seen["num_requests_waiting",] == 2
    assert seen["kv_cache_usage_perc",] == 0.5
    assert seen["num_preemptions_total",] == 6
    assert seen["prefix_cache_hits_total",] == 80
    assert seen["expert_tokens_total", ("expert", "0"), ("layer", "1")] == 4
    assert seen["expert_tokens_total", ("expert", "1"), ("layer", "1")] == 2
    assert seen["expert_tokens_total", ("expert", "3"), ("layer", "3")] == 2
    assert seen["rank_tokens_total", ("rank", "0")] == 10
    assert seen["rank_tokens_total", ("rank", "1")] == 6
    assert seen["all_to_all_bytes_total", ("path", "node")] == 20
    assert seen["all_to_all_bytes_total", ("path", "self")] == 20
    assert seen["step_seconds_total", ("part", "step")] == 2.0


def test_waits_are_by_step_and_idle_experts_by_layer():
    clock = Clock()
    snapshots = [snapshot(0, [[4, 0, 0], [1, 1, 1]], [[4], [3]], wait=0.5)]
    snapshots += [snapshot(1, [[0, 0, 2], [0, 0, 0]], [[2], [0]], wait=0.1)]
    metrics = attached(snapshots, clock=clock)
    seen = figures(metrics)
    assert seen["step_wait_seconds", ("rank", "0")] == 0.5
    assert seen["step_wait_seconds", ("rank", "1")] == 0.1
    assert seen["idle_experts", ("layer", "1")] == 1
    assert seen["idle_experts", ("layer", "3")] == 0
    clock.now += 40
    later = snapshot(0, [[4, 0, 0], [1, 1, 1]], [[4], [3]], wait=0.9)
    later.values["calls"]["step"] = 5
    snapshots[0] = later
    seen = figures(metrics)
    assert seen["step_wait_seconds", ("rank", "0")] == pytest.approx(0.1)  # of the last four
    assert seen["step_wait_seconds", ("rank", "1")] == 0.1


def test_what_became_of_rebalances():
    record = Rebalances(1.25)
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: TWO, 2, 2, 1000, record))
    seen = figures(metrics)
    for result in ("moved", "unchanged", "failed"):
        assert seen["rebalance_total", ("result", result)] == 0
    assert seen["rebalance_threshold",] == 1.25 and ("rebalance_measured_gain",) not in seen
    record.results["failed"] += 1
    record.seconds.observe(0.2)
    record.moved_bytes += 77
    record.predicted_gain, record.measured_gain = 0.5, -0.25
    seen = figures(metrics)
    assert seen["rebalance_total", ("result", "failed")] == 1
    assert seen["rebalance_seconds_sum",] == 0.2 and seen["rebalance_seconds_count",] == 1
    assert seen["rebalance_moved_bytes_total",] == 77
    assert (seen["rebalance_predicted_gain",], seen["rebalance_measured_gain",]) == (0.5, -0.25)


def test_load_figures_of_the_running_window():
    seen = figures(attached(TWO))
    loads = np.array([4, 2, 1, 1])
    assert seen["expert_load_std_dev", ("layer", "1")] == pytest.approx(loads.std() / loads.mean())
    assert seen["expert_load_std_dev", ("layer", "3")] == 0
    assert seen["rank_load_std_dev", ("layer", "1")] == pytest.approx(2 / 4)
    assert seen["expert_balancedness", ("layer", "1")] == pytest.approx(4 / 6)
    assert seen["expert_balancedness", ("layer", "3")] == 1.0
    assert seen["load_window_tokens",] == 1000
    assert seen["load_window_filled_tokens",] == 4  # 8 rows of top-2
    assert seen["load_windows_total",] == 0


def test_a_closed_window_stays_until_the_next_has_closed():
    snapshots = [snapshot(0, [[20, 0], [10, 10]], [[20], [10]])]
    snapshots.append(snapshot(1, [[0, 0], [0, 0]], [[0], [10]]))
    metrics = attached(snapshots, window=10)
    assert figures(metrics)["load_windows_total",] == 1
    skewed = figures(metrics)["expert_load_std_dev", ("layer", "1")]
    assert skewed == 1.0
    snapshots[0] = snapshot(0, [[25, 5], [15, 15]], [[25], [15]])
    seen = figures(metrics)
    assert seen["load_window_filled_tokens",] == 5
    assert seen["expert_load_std_dev", ("layer", "1")] == skewed
    snapshots[0] = snapshot(0, [[30, 10], [20, 20]], [[30], [20]])
    seen = figures(metrics)
    assert seen["load_windows_total",] == 2
    assert seen["expert_load_std_dev", ("layer", "1")] == 0.0
    assert seen["rank_load_std_dev", ("layer", "1")] == 1.0  # 20 rows against none


def test_totals_never_fall_when_a_rank_starts_anew_or_is_silent():
    snapshots = [*TWO]
    metrics = attached(snapshots)
    before = figures(metrics)
    snapshots[1] = snapshot(1, [[0, 1, 0, 0], [0, 0, 0, 1]], [[1, 0], [1, 0]], step=0.5)
    restarted = figures(metrics)
    falling = {k for k, v in before.items() if k[0].endswith("_total") and restarted[k] < v}
    assert not falling
    assert restarted["expert_tokens_total", ("expert", "1"), ("layer", "1")] == 3
    assert restarted["rank_tokens_total", ("rank", "1")] == 8
    assert restarted["step_seconds_total", ("part", "step")] == 2.5
    assert restarted["dispatch_seconds_count",] == before["dispatch_seconds_count",] + 2
    del snapshots[1]
    assert figures(metrics)["rank_tokens_total", ("rank", "1")] == 8


def test_histograms_are_merged_and_cumulative():
    seen = figures(attached(TWO))
    assert seen["dispatch_seconds_count",] == 4
    assert seen["dispatch_seconds_sum",] == pytest.approx(2 * 1e-4 + 2 * 3e-4 + 1)
    assert seen["dispatch_seconds_bucket", ("le", "0.0001")] == 2
    assert seen["dispatch_seconds_bucket", ("le", "0.0004")] == 3
    assert seen["dispatch_seconds_bucket", ("le", "1.0")] == 3
    assert seen["dispatch_seconds_bucket", ("le", "+Inf")] == 4
    assert seen["combine_seconds_count",] == 0


def test_rates_and_busy_share_look_back_over_the_recent_past():
    clock, snapshots = Clock(), []
    metrics = attached(snapshots, clock=clock)
    experts, slots = [[1, 1], [1, 1]], [[1], [1]]
    snapshots[:] = [
        snapshot(0, experts, slots, step=10, wait=9, prompt=100, output=50),
        snapshot(1, experts, slots, step=10, wait=1),
    ]
    clock.now += 10
    seen = figures(metrics)
    assert seen["prefill_tpgs",] == pytest.approx(100 / 10 / 2)
    assert seen["decode_tpgs",] == pytest.approx(50 / 10 / 2)
    assert seen["rank_busy_ratio", ("rank", "0")] == pytest.approx(0.1)
    assert seen["rank_busy_ratio", ("rank", "1")] == pytest.approx(0.9)
    snapshots[0] = snapshot(0, experts, slots, step=20, wait=9, prompt=100, output=650)
    clock.now += 40
    metrics.sample()
    clock.now += 20
    seen = figures(metrics)  # against the reading 60 s ago
    assert seen["prefill_tpgs",] == 0
    assert seen["decode_tpgs",] == pytest.approx(600 / 60 / 2)
    assert seen["rank_busy_ratio", ("rank", "0")] == 1.0
    assert seen["rank_busy_ratio", ("rank", "1")] == pytest.approx(0.9)  # no step: since the start


def test_request_side():
    metrics = GatewayMetrics()
    metrics.first_token(0.03, queue_seconds=0.0002)
    metrics.tokens(0.04, 2)
    metrics.tokens(0.2, 1)
    metrics.finished("stop", 1.2)
    metrics.response("/v1/completions", 429)
    seen = figures(metrics)
    assert seen["time_to_first_token_seconds_bucket", ("le", "0.02")] == 0
    assert seen["time_to_first_token_seconds_bucket", ("le", "0.04")] == 1
    assert seen["inter_token_latency_seconds_count",] == 3
    assert seen["inter_token_latency_seconds_sum",] == pytest.approx(0.24)
    assert seen["inter_token_latency_seconds_bucket", ("le", "0.025")] == 2
    assert seen["request_queue_time_seconds_bucket", ("le", "0.0005")] == 1
    assert seen["e2e_request_latency_seconds_sum",] == 1.2
    assert seen["request_success_total", ("finished_reason", "stop")] == 1
    assert seen["request_success_total", ("finished_reason", "length")] == 0
    assert seen["http_responses_total", ("route", "/v1/completions"), ("status", "429")] == 1
    assert ("num_requests_running",) not in seen  # no engine yet


def test_a_rank_that_has_done_nothing_is_no_error():
    bare = Snapshot(0, Recorder().snapshot())
    seen = figures(attached([bare]))
    assert seen["prompt_tokens_total",] == 0
    assert ("rank_busy_ratio", ("rank", "0")) not in seen


def test_ranks_do_not_import_prometheus_client():
    code = "import sys, crossdock.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
