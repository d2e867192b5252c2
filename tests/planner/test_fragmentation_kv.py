import random

import numpy as np
import pytest

from crossdock.core import ConfigError, Request, Sampled, SamplingParams
from crossdock.core.messages import Snapshot
from crossdock.metrics.exposition import Engine, GatewayMetrics
from crossdock.planner.fragmentation import (
    best_page_size,
    fragmentation,
    kv_state,
    lifetime,
    parse_lengths,
)
from crossdock.scheduler import Scheduler


def test_rounding_of_known_lengths():
    f = fragmentation([16, 17, 1], 16)
    assert f.tokens == pytest.approx((0 + 15 + 15) / 3)
    assert f.expected == pytest.approx(30 / 64)
    assert f.reserved_over_used == pytest.approx(64 / 34)
    assert fragmentation([16, 17, 1], 1).expected == 0


def test_against_counting_pages():
    rng = random.Random()
    lengths = [rng.randrange(1, 5000) for _ in range(500)]
    for page in (1, 16, 100):
        wasted = [(-n) % page for n in lengths]
        shares = sorted(w / (n + w) for n, w in zip(lengths, wasted, strict=True))
        f = fragmentation(lengths, page)
        assert f.expected == pytest.approx(sum(wasted) / (sum(lengths) + sum(wasted)))
        assert shares[493] <= f.p99 <= shares[495]


def test_a_growing_request_wastes_half_a_page():
    f = fragmentation(lifetime(2000, 640), 64)
    assert f.tokens == pytest.approx(31.5, abs=0.5)
    assert f.p99 > f.expected


def test_the_best_page_size():
    lengths = lifetime(2000, 100)
    best = best_page_size(lengths)
    assert best.expected <= 0.01
    assert fragmentation(lengths, 2 * best.page_size).expected > 0.01
    assert best_page_size([3], sizes=(4, 8)).page_size == 4  # none is good enough
    assert best_page_size([100_000]).page_size == 256


def test_distributions():
    assert parse_lengths("2000").tolist() == [2000]
    uniform = parse_lengths("uniform:100:300")
    assert uniform.min() >= 100 and uniform.max() <= 300
    assert np.mean(uniform) == pytest.approx(200, rel=0.02)
    skewed = parse_lengths("lognormal:500:8000")
    assert np.median(skewed) == pytest.approx(500, rel=0.05)
    assert np.quantile(skewed, 0.99) == pytest.approx(8000, rel=0.15)
    for wrong in ("0", "uniform:5", "uniform:9:5", "normal:1:2", "-3", ""):
        with pytest.raises(ConfigError, match="expected N, uniform"):
            parse_lengths(wrong or "''")


def test_lengths_of_a_file(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("12\n7\n")
    assert parse_lengths(str(path)).tolist() == [12, 7]
    path.write_text("12\nx\n")
    with pytest.raises(ConfigError, match="one length per line"):
        parse_lengths(str(path))


@pytest.mark.parametrize(("lengths", "page"), [([], 16), ([0], 16), ([5], 0)])
def test_impossible_lengths(lengths, page):
    with pytest.raises(ConfigError, match="at least 1"):
        fragmentation(lengths, page)


def step(scheduler):
    plan = scheduler.plan()
    scheduler.advance(plan)
    return scheduler.observe(plan, [Sampled(7) if i.sample else None for i in plan.items])


def scheduler_of(tokens=16):
    return Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=tokens,
        max_model_len=100,
        page_size=4,
        num_pages=20,
        namespace="x",
    )


def add(scheduler, name, prompt, outputs=8):
    scheduler.add(Request(name, tuple(prompt), SamplingParams(max_tokens=outputs, ignore_eos=True)))


def test_the_scheduler_tells_its_pages_apart():
    s = scheduler_of()
    add(s, "a", range(30))
    step(s)  # 16 of 30 tokens: 4 of 8 pages
    stats = s.stats()
    assert (stats["pages_used"], stats["kv_tokens"], stats["pages_reserved"]) == (4, 16, 4)
    step(s)
    stats = s.stats()
    assert (stats["pages_used"], stats["kv_tokens"]) == (8, 30)
    assert stats["pages_reserved"] == 0 and stats["page_size"] == 4
    # A second one shares 7 full pages; their tokens are counted once.
    add(s, "b", [*range(28), 99, 98])
    step(s)
    stats = s.stats()
    assert stats["pages_used"] == 9 and stats["kv_tokens"] == 31 + 2
    while s.has_work:
        step(s)
    stats = s.stats()
    assert (stats["pages_used"], stats["kv_tokens"], stats["pages_reserved"]) == (0, 0, 0)
    assert stats["pages_cached"] > 0
    assert stats["pages_cached"] + stats["pages_free"] == 20


def test_a_server_s_pages_through_its_metrics():
    busy, idle = scheduler_of(), scheduler_of()
    add(busy, "a", range(30))
    step(busy)
    add(idle, "b", range(9), outputs=1)
    while idle.has_work:
        step(idle)
    snapshots = [Snapshot(r, {"scheduler": s.stats()}) for r, s in enumerate((busy, idle))]
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: snapshots, ranks=2, top_k=2, load_window_tokens=64))
    state = kv_state(metrics.expose().decode())
    assert (state.page_size, state.used, state.reserved) == (4, 4, 4)
    assert (state.cached, state.free) == (2, 34)
    assert state.tokens == 16 and state.rounding == 0 and state.reserved_over_used == 1
    step(busy)
    snapshots[0] = Snapshot(0, {"scheduler": busy.stats()})
    state = kv_state(metrics.expose().decode())
    assert state.rounding == pytest.approx(2 / 32)
    assert state.reserved_over_used == pytest.approx(32 / 30)
    assert "8 of 40 pages" in state.lines()[0]


def test_other_servers_are_refused():
    with pytest.raises(ConfigError, match="kv_page_size_tokens"):
        kv_state("# HELP x\nvllm:kv_cache_usage_perc 0.5\n")
