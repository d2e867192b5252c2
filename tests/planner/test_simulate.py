"""The simulator against what can be worked out without it."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from crossdock.core import ConfigError
from crossdock.planner.layout import Layout
from crossdock.planner.simulate import (
    Arrival,
    KVLink,
    Pool,
    SimConfig,
    poisson,
    profile_arrivals,
    simulate,
)


def step_time(layout, load):
    """Seconds: a constant, the fullest group's chunk and decodes, and what these read."""
    chunk = 2e-5 * load.prefill_G.max() * load.imbalance
    return 0.01 + chunk + 2e-5 * load.decodes_G.max() + 1e-9 * load.kv_G.max()


def both(gpus=4, kv_tokens=100_000, **changes):
    return (Pool(Layout("both", gpus), kv_tokens, **changes),)


def split(prefill=2, decode=4, kv_tokens=100_000, **changes):
    return (
        Pool(Layout("prefill", prefill), kv_tokens, **changes),
        Pool(Layout("decode", decode), kv_tokens, **changes),
    )


def random_arrivals(seed, count=150, seconds=10.0):
    rng = random.Random(seed)
    times = sorted(rng.random() * seconds for _ in range(count))
    return tuple(Arrival(t, rng.randint(1, 900), rng.randint(1, 60)) for t in times)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_waits_as_long_as_an_m_d_1_queue(load):
    """Mean wait = load * service / (2 (1 - load)): Pollaczek-Khinchine, constant service."""
    service = 0.1
    config = SimConfig(
        poisson(load / service, 20_000 * service / load, isl=2, osl=1, seed=1),
        both(gpus=1, max_num_seqs=1),
        lambda layout, work: service,
        warmup_s=100.0,
    )
    result = simulate(config)
    wait = result.ttft_s.mean - service
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.12)
    assert result.pools["both"].busy == pytest.approx(load, rel=0.03)
    assert result.request_rate == pytest.approx(load / service, rel=0.03)
    assert result.verdict == "steady"


@pytest.mark.parametrize("load", [1.15, 1.5])
def test_an_overloaded_system_has_no_throughput(load):
    service = 0.1
    config = SimConfig(
        poisson(load / service, 2_000 * service, isl=2, osl=1, seed=2),
        both(gpus=1, max_num_seqs=1),
        lambda layout, work: service,
    )
    result = simulate(config)
    assert result.verdict == "overloaded"
    assert result.output_rate is result.request_rate is result.goodput is result.ttft_s is None
    assert result.open_growth == pytest.approx((load - 1) / load / 1, rel=0.35)
    assert result.finished == result.requests == len(config.arrivals)  # still, none is lost
    # The queue in the series grows.
    half = len(result.series.queued) // 2
    assert max(result.series.queued[:10]) < result.series.queued[half // 2]


def test_a_run_that_ends_while_it_fills_is_told_from_overload():
    arrivals = poisson(20, 4, isl=10, osl=300, seed=3)
    result = simulate(SimConfig(arrivals, both(), step_time))
    assert result.verdict == "too short"
    assert "simulate" in result.why
    longer = poisson(20, 60, isl=10, osl=300, seed=3)
    assert simulate(SimConfig(longer, both(), step_time)).verdict == "steady"


def test_two_requests_by_hand():
    """Two groups, the second request comes while the first one's prompt is computed."""
    arrivals = (Arrival(0.0, 1000, 3), Arrival(0.005, 500, 1))
    result = simulate(SimConfig(arrivals, both(gpus=2), step_time, warmup_s=0.0))
    first = 0.01 + 2e-5 * 1000
    second = 0.01 + 2e-5 * 500 + 2e-5 + 1e-9 * 1000  # a decode of the one, the other's prompt
    third = 0.01 + 2e-5 + 1e-9 * 1001
    assert result.pools["both"].steps == 3
    ttfts = (first, first + second - 0.005)
    assert result.ttft_s.mean == pytest.approx(sum(ttfts) / 2)
    assert result.tpot_s.mean == pytest.approx((second + third) / 2)
    assert result.e2e_s.mean == pytest.approx((first + second + third + ttfts[1]) / 2)
    assert result.pools["both"].tokens == 1000 + 2 + 500


@pytest.mark.parametrize("pools", [both(), both(instances=2, gpus=2), split()])
@pytest.mark.parametrize("page_size", [1, 64])
def test_every_request_ends_and_every_page_comes_back(pools, page_size):
    pools = tuple(replace(pool, page_size=page_size) for pool in pools)
    link = KVLink(1000, 1e9, 1e-4) if len(pools) == 2 else None
    arrivals = random_arrivals(7)
    result = simulate(SimConfig(arrivals, pools, step_time, kv_link=link))
    assert (result.finished, result.failed) == (len(arrivals), 0)
    assert all(used[-1] == 0 for used in result.series.kv_used.values())
    assert any(max(used) > 0 for used in result.series.kv_used.values())
    computed = {name: pool.tokens for name, pool in result.pools.items()}
    prompts, outputs = sum(a.isl for a in arrivals), sum(a.osl - 1 for a in arrivals)
    if link is None:
        assert computed == {"both": prompts + outputs}
    else:
        assert computed == {"prefill": prompts, "decode": outputs}


@pytest.mark.parametrize("pools", [both(gpus=2, kv_tokens=1500), split(kv_tokens=1500)])
def test_with_little_kv_requests_are_preempted_and_computed_again(pools):
    link = KVLink(1000, 1e9, 1e-4) if len(pools) == 2 else None
    arrivals = tuple(Arrival(0.01 * i, 700, 200) for i in range(40))
    result = simulate(SimConfig(arrivals, pools, step_time, kv_link=link))
    last = result.pools[pools[-1].layout.role]
    assert last.preemptions > 0
    assert result.finished == 40
    least = 40 * (199 if link else 899)
    # A preempted request computes its prompt again, even one that had come with its KV.
    assert last.tokens >= least + 700 * last.preemptions


def test_a_request_that_can_never_fit_fails_alone():
    arrivals = (Arrival(0.0, 100, 2), Arrival(0.1, 5000, 2), Arrival(0.2, 100, 2))
    result = simulate(SimConfig(arrivals, both(gpus=1, kv_tokens=1000), step_time))
    assert (result.requests, result.finished, result.failed) == (3, 2, 1)


def test_equal_seeds_give_equal_results():
    def run(seed):
        arrivals = poisson(20, 10, 300, 20, seed=seed)
        return simulate(SimConfig(arrivals, split(), step_time, kv_link=KVLink(1000, 1e9, 1e-4)))

    assert run(5).to_json() == run(5).to_json()
    assert run(5).to_json() != run(6).to_json()


def test_kv_travels_between_prefill_and_decode():
    alone = (Arrival(0.0, 800, 11),)

    def run(**link):
        return simulate(SimConfig(alone, split(), step_time, kv_link=KVLink(**link), warmup_s=0.0))

    fast = run(bytes_per_token=1000, bytes_per_s=1e12, latency_s=0.0)
    slow = run(bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.25)
    assert slow.ttft_s == fast.ttft_s
    assert slow.kv_transfer_s.mean == pytest.approx(0.8 + 0.25)
    assert slow.e2e_s.mean - fast.e2e_s.mean == pytest.approx(0.8 + 0.25, rel=1e-5)


def test_transfers_of_one_sender_queue_on_its_link():
    burst = tuple(Arrival(0.0, 100, 2) for _ in range(3))
    pools = split(prefill=1)
    result = simulate(SimConfig(burst, pools, step_time, kv_link=KVLink(1000, 1e6, 0.0)))
    assert result.kv_transfer_s.mean == pytest.approx(0.1 * (1 + 2 + 3) / 3)


def test_split_roles_keep_prompts_out_of_decode_steps():
    arrivals = poisson(12, 30, isl=900, osl=40, seed=4)
    mixed = simulate(SimConfig(arrivals, both(gpus=6), step_time))
    apart = simulate(SimConfig(arrivals, split(2, 4), step_time, kv_link=KVLink(1000, 1e10, 0.0)))
    assert apart.tpot_s.mean < 0.8 * mixed.tpot_s.mean


@pytest.mark.parametrize("rate", [1.0, 3.0, 6.0])
def test_groups_that_stand_for_others_agree_with_all_of_them(rate):
    """Within 10% on what requests see and 2% on what is served, at light and at heavy load."""
    gpus = 32
    arrivals = poisson(rate * gpus, 25, isl=600, osl=50, seed=11)
    pools = both(gpus=gpus, max_num_batched_tokens=1024)
    every = simulate(SimConfig(arrivals, pools, step_time))
    some = simulate(SimConfig(arrivals, pools, step_time, stand_for=4))
    assert some.verdict == every.verdict == "steady"
    assert some.tpot_s.mean == pytest.approx(every.tpot_s.mean, rel=0.1)
    assert some.ttft_s.mean == pytest.approx(every.ttft_s.mean, rel=0.1)
    assert some.output_rate == pytest.approx(every.output_rate, rel=0.02)
    a, b = (r.pools["both"] for r in (some, every))
    assert a.rank_steps == pytest.approx(b.rank_steps, rel=0.1)
    assert a.tokens == pytest.approx(b.tokens, rel=0.02)


def test_groups_that_stand_for_others_agree_with_split_roles_too():
    arrivals = poisson(64, 25, isl=600, osl=50, seed=12)
    link = KVLink(1000, 1e9, 1e-4)
    pools = split(8, 16, max_num_batched_tokens=2048)
    every, some = (
        simulate(SimConfig(arrivals, pools, step_time, kv_link=link, stand_for=k)) for k in (1, 4)
    )
    for a, b in ((some.tpot_s, every.tpot_s), (some.ttft_s, every.ttft_s)):
        assert a.mean == pytest.approx(b.mean, rel=0.1)
    assert some.output_rate == pytest.approx(every.output_rate, rel=0.02)
    assert some.kv_transfer_s.mean == pytest.approx(every.kv_transfer_s.mean, rel=0.1)


def test_a_shared_prefix_is_computed_once_a_group():
    plain = tuple(Arrival(0.05 * i, 640, 5) for i in range(100))
    shared = tuple(replace(a, prefix=f"p{i % 3}", prefix_tokens=512) for i, a in enumerate(plain))
    without, hit = (simulate(SimConfig(a, both(), step_time)) for a in (plain, shared))
    assert without.pools["both"].prefix_hits == 0
    assert hit.pools["both"].prefix_hits > 0.5
    assert hit.pools["both"].tokens < 0.6 * without.pools["both"].tokens
    assert hit.ttft_s.mean < without.ttft_s.mean


def test_goodput_counts_requests_within_the_limits():
    arrivals = poisson(20, 40, isl=300, osl=20, seed=8)
    free = simulate(SimConfig(arrivals, both(), step_time))
    assert free.goodput == free.request_rate
    median = simulate(SimConfig(arrivals, both(), step_time, ttft_s=free.ttft_s.p50))
    assert median.goodput == pytest.approx(free.request_rate / 2, rel=0.1)
    never = simulate(SimConfig(arrivals, both(), step_time, tpot_s=1e-3))
    assert never.goodput == 0


def test_a_profile_sets_the_rate_of_each_time():
    arrivals = profile_arrivals([10.0, 0.0, 40.0], 50.0, 5, 5, seed=9)
    times = np.array([a.time_s for a in arrivals])
    assert all(a <= b for a, b in pairwise(times))
    counts = np.histogram(times, [0, 50, 100, 150])[0]
    assert counts[1] == 0
    assert counts[[0, 2]] == pytest.approx([500, 2000], rel=0.15)


def test_impossible_configs_are_refused():
    arrivals = (Arrival(0.0, 5, 5),)
    with pytest.raises(ConfigError, match="no arrivals"):
        SimConfig((), both(), step_time)
    with pytest.raises(ConfigError, match="stand_for 3 does not divide the 4"):
        SimConfig(arrivals, both(), step_time, stand_for=3)
    with pytest.raises(ConfigError, match="kv_link"):
        SimConfig(arrivals, split(), step_time)
    with pytest.raises(ConfigError, match="kv_tokens must be at least 64, got 5"):
        both(kv_tokens=5)
