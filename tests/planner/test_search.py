"""The search over a made-up machine whose prices are simple enough to solve by hand."""

import dataclasses
import itertools
import math
from dataclasses import dataclass, replace

import pytest

from crossdock.core import CapacityError
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import Hardware, Link, load_hardware
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.search import search
from crossdock.planner.search_deployment import FULL, ROOMY
from crossdock.planner.search_points import (
    Curve,
    Fit,
    decode_curve,
    frontier,
    prefill_curve,
    steady_sequences,
    within_limit,
)
from crossdock.planner.search_space import Formats, decode_batches, instance_sizes, layouts

FORMATS = Formats("bfloat16", "bfloat16")
SPEC = load_model("qwen3-30b-a3b")
NODE = Hardware(
    "made-up", 80 << 30, 3e12, {"bfloat16": 1e15}, 8,
    Link("inner", 4e11, 1e-6), Link("outer", 4e10, 1e-5),
)  # fmt: skip
WORK = Workload(isl=1000, osl=100, ttft_s=10.0, tpot_s=1.0)


@dataclass(frozen=True)
class Seconds:
    total: float
    hidden: float = 0.0

    @property
    def parts(self):
        return {"experts": self.total}

    @property
    def exposed_communication(self) -> float:
        return 0.0

    @property
    def explain(self):
        return ()


class Prices:
    """A step takes `fixed[phase]` s and `each[phase]` s per token and GPU; `fits`: of a layout."""

    def __init__(self, fixed=None, each=None, fits=lambda layout: Fit(100_000)):
        self.fixed = fixed or {"prefill": 0.01, "decode": 0.01}
        self.each = each or {"prefill": 1e-4, "decode": 1e-4}
        self.fits = fits

    def fit(self, layout: Layout) -> Fit:
        return self.fits(layout)

    def step(self, layout, phase, tokens_per_gpu, context):
        return Seconds(self.fixed[phase] + self.each[phase] * tokens_per_gpu)


def only(*sizes):
    return lambda x: x.gpus in sizes and x.tp == 1 and x.experts == "ep" and x.overlap == "off"


def test_sizes_tile_nodes_and_are_whole_nodes_beyond():
    assert instance_sizes(8, 96) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 80, 96]
    assert instance_sizes(8, 6) == [1, 2, 4]
    sizes = instance_sizes(72, 144)
    assert {1, 2, 36, 48, 64, 72, 144} <= set(sizes) and 5 not in sizes and 100 not in sizes


@pytest.mark.parametrize("most", [1, 2, 7, 100, 4096])
def test_decode_batches_rise_by_at_most_a_quarter_and_end_at_the_most(most):
    grid = decode_batches(most)
    assert grid[0] == 1 and grid[-1] == most and grid == sorted(set(grid))
    assert all(b <= max(a + 1, a * 1.25) for a, b in itertools.pairwise(grid))


def test_every_layout_is_offered_once_and_can_be_laid_out():
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")
    formats = Formats("float8_e4m3fn", "bfloat16")
    found = list(layouts(spec, hardware, 96, "decode", formats))
    assert len(found) == len(set(found))
    assert all(x.gpus % x.tp == 0 and spec.attention.num_heads % x.tp == 0 for x in found)
    assert {x.mode for x in found} == {"normal", "low_latency"}
    assert {x.overlap for x in found} == {"off", "sbo", "tbo"}
    assert {x.experts for x in found} == {"ep", "tp"}
    # 24 GPUs are 3 nodes, which cannot hold whole ones of 8 groups of experts.
    prefill = {x.gpus for x in layouts(spec, hardware, 96, "prefill", formats)}
    assert {8, 16, 32, 64} <= prefill and not prefill & {24, 40, 48, 72, 96}
    assert 24 in {x.gpus for x in found}


def test_a_gpu_without_a_network_stays_within_its_node():
    lonely = replace(NODE, outer=None)
    assert max(x.gpus for x in layouts(SPEC, lonely, 64, "decode", FORMATS)) == 8


def test_room_for_chance_is_two_roots():
    for held in (0, 1, 2, 10, 219, 4000):
        n = steady_sequences(held)
        assert 0 <= n <= held
        if held > 3:
            assert n + 2 * math.sqrt(n) <= held < n + 1 + 2 * math.sqrt(n + 1)


def test_decode_stops_where_kv_ends():
    layout = Layout("decode", 8)
    curve = decode_curve(Prices(), layout, WORK)
    assert isinstance(curve, Curve)
    held = 100_000 // 1100
    assert curve.points[-1].batch == steady_sequences(held)
    assert "KV memory" in curve.bound(curve.points[-1], None, "TPOT")


def test_buffers_that_grow_with_the_batch_are_paid_from_kv():
    def fits(layout):
        return Fit(max(0, 100_000 - 1000 * layout.max_tokens_per_rank))

    curve = decode_curve(Prices(fits=fits), Layout("decode", 8), WORK)
    most = curve.points[-1].layout.max_tokens_per_rank

    def held(n):
        return steady_sequences((100_000 - 1000 * n) // 1100)

    assert held(most) >= most and held(most + 1) < most + 1


def test_low_latency_has_a_largest_batch():
    prices = Prices(fits=lambda layout: Fit(10**9))
    curve = decode_curve(prices, Layout("decode", 8, mode="low_latency"), WORK)
    assert curve.points[-1].batch == 1024 and "low-latency" in curve.end


def test_a_limit_is_met_to_within_a_sixtieth():
    prices = Prices(fits=lambda layout: Fit(10**9))
    work = replace(WORK, tpot_s=0.0437)
    curve = within_limit(prices, decode_curve(prices, Layout("decode", 1), work), work, work.tpot_s)
    within = max(p.batch for p in curve.points if p.latency_s <= work.tpot_s)
    exact = (0.0437 - 0.01) / 1e-4
    assert exact * (1 - 1 / 60) <= within <= exact
    assert "TPOT" in curve.bound(next(p for p in curve.points if p.batch == within), 0.0437, "TPOT")


def test_prefill_is_no_longer_than_it_is_worth():
    curve = prefill_curve(Prices(), Layout("prefill", 8), WORK)
    best = curve.best(None)
    assert best.requests_per_gpu_s >= 0.98 * curve.peak.requests_per_gpu_s
    assert best.batch < curve.peak.batch
    assert curve.best(0.01) is None


def test_a_long_prompt_goes_in_chunks():
    work = replace(WORK, isl=10_000)
    point = prefill_curve(Prices(), Layout("prefill", 8), work).points[0]
    assert point.batch == 256
    assert point.latency_s == pytest.approx((10_000 / 256 + 0.5) * (0.01 + 256e-4))


def test_a_layout_that_does_not_fit_says_by_how_much():
    prices = Prices(fits=lambda layout: Fit(0, 5 << 30))
    with pytest.raises(CapacityError, match=r"short by 5\.0 GiB per GPU.*--gpus \(16 given\)"):
        search(SPEC, NODE, WORK, prices, FORMATS, 16)


def test_kv_too_small_for_one_request_says_by_how_many_tokens():
    with pytest.raises(CapacityError, match=r"short by 300 tokens"):
        search(SPEC, NODE, WORK, Prices(fits=lambda layout: Fit(800)), FORMATS, 16)


@pytest.mark.parametrize(("limit", "name"), [("ttft_s", "TTFT"), ("tpot_s", "TPOT")])
def test_a_limit_that_nothing_meets_is_named(limit, name):
    work = dataclasses.replace(WORK, **{limit: 0.005})
    with pytest.raises(CapacityError, match=rf"{name} 5\.0 ms is short by"):
        search(SPEC, NODE, work, Prices(), FORMATS, 16)


def test_the_ratio_of_roles_is_the_best_there_is():
    """Both roles on single GPUs: by trying every number of them by hand."""
    prices = Prices(each={"prefill": 1e-4, "decode": 1e-3})
    found = search(SPEC, NODE, WORK, prices, FORMATS, 40, allowed=only(1))
    split = next(d for d in found.ranked if d.kind == "split")
    p = prefill_curve(prices, split.prefill.point.layout, WORK).best(None).requests_per_gpu_s
    curve = decode_curve(prices, split.decode.point.layout, WORK)
    d = curve.best(1.0).requests_per_gpu_s
    by_hand = max(min(n * p, (40 - n) * d) for n in range(1, 40))
    assert split.capacity == pytest.approx(by_hand)
    assert split.gpus <= 40


def test_together_shares_the_time_of_each_gpu():
    found = search(SPEC, NODE, WORK, Prices(), FORMATS, 8, allowed=only(8), split=False)
    best = found.ranked[0]
    b, step = best.decode.point.batch, best.decode.point.step.total
    prefill = best.prefill.point.step.total / best.prefill.point.batch * WORK.isl
    assert best.kind == "together" and best.gpus == 8
    assert best.capacity == pytest.approx(8 * b / (WORK.osl * step + b * prefill))
    assert best.tpot_s == pytest.approx(step + b * prefill / WORK.osl)
    assert best.tpot_s <= WORK.tpot_s


def test_a_rate_takes_as_few_gpus_as_carry_it_with_room():
    rate = 300.0
    work = replace(WORK, request_rate=rate)
    found = search(SPEC, NODE, work, Prices(), FORMATS, 10_000, allowed=only(1))
    best = found.ranked[0]
    assert not best.overloaded and best.rate == rate
    assert best.capacity * FULL >= rate
    assert max(best.prefill.load, best.decode.load) <= FULL
    fewer = search(SPEC, NODE, work, Prices(), FORMATS, best.gpus - 1, allowed=only(1)).ranked[0]
    assert fewer.overloaded


def test_a_queue_that_would_break_the_limit_takes_more_prefill():
    """At 90% load a group waits 4.5 services; a limit just above the empty system's needs less."""
    prices = Prices(each={"prefill": 1e-3, "decode": 1e-5})
    free = replace(WORK, request_rate=30.0, ttft_s=None)
    allowed = only(1)
    loose = search(SPEC, NODE, free, prices, FORMATS, 1000, allowed=allowed).ranked
    loose = next(d for d in loose if d.kind == "split")
    point = loose.prefill.point
    tight = replace(free, ttft_s=point.latency_s + (loose.ttft_s - point.latency_s) / 2)
    found = search(SPEC, NODE, tight, prices, FORMATS, 1000, allowed=allowed).ranked
    assert all(d.ttft_s <= tight.ttft_s for d in found if not d.overloaded)
    assert any(d.kind == "split" for d in found)


def test_an_overloaded_deployment_never_claims_the_rate():
    work = replace(WORK, request_rate=1e6)
    found = search(SPEC, NODE, work, Prices(), FORMATS, 16, allowed=only(1, 2, 4, 8))
    assert all(d.overloaded and d.rate <= FULL * d.capacity < 1e6 for d in found.ranked)


def test_decode_runs_at_the_batch_that_arrivals_fill():
    prices = Prices(each={"prefill": 1e-3, "decode": 1e-6})
    found = search(SPEC, NODE, WORK, prices, FORMATS, 16, allowed=only(8))
    best = next(d for d in found.ranked if d.kind == "split")
    assert best.decode.load < 0.5 and "arrivals" in best.decode.bound
    assert best.decode.point.batch < best.decode.most
    assert best.decode.point.requests_per_gpu_s * best.decode.gpus >= best.rate


def test_equals_are_decided_by_room():
    """Eight GPUs a role are 5% faster than four and leave no room."""

    def fits(layout):
        tight = layout.gpus == 8
        return Fit(100_000, 0, ROOMY + 0.1 if tight else ROOMY - 0.1)

    class Uneven(Prices):
        def step(self, layout, phase, tokens_per_gpu, context):
            slow = 1.0 if layout.gpus == 8 else 1.05
            return Seconds(slow * super().step(layout, phase, tokens_per_gpu, context).total)

    sizes = [
        search(SPEC, NODE, WORK, Uneven(fits=fits), FORMATS, 16, allowed=only(4, 8), tie=tie)
        .ranked[0].prefill.point.layout.gpus
        for tie in (0.0, 0.2)
    ]  # fmt: skip
    assert sizes == [8, 4]


def test_frontier_keeps_what_nothing_beats():
    prices = Prices(fits=lambda layout: Fit(10**7))
    curve = decode_curve(prices, Layout("decode", 8), WORK)
    kept = frontier(curve.points)
    assert kept
    for p in curve.points:
        beaten = any(
            q.latency_s <= p.latency_s and q.requests_per_gpu_s > p.requests_per_gpu_s for q in kept
        )
        assert (p in kept) != beaten


def test_progress_reaches_its_end():
    told = []
    search(SPEC, NODE, WORK, Prices(), FORMATS, 4, on_progress=lambda *a: told.append(a))
    assert told[-1][0] == told[-1][1] > 0 and [t[0] for t in told] == sorted(t[0] for t in told)
