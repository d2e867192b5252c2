"""Exchanges over links, against the floors and definitions of their sources."""

import math

import pytest

from crossdock.core import ConfigError, MoESpec
from crossdock.planner.calibration import DEFAULT
from crossdock.planner.cost import all_reduce_s, communication_table, exchange_s, spread
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import Hardware, Link

MOE = MoESpec(256, 8, 2048, num_groups=8, topk_groups=4)
FLAT = MoESpec(256, 8, 2048)
FP8_ROW, BF16_ROW = 7392.0, 14336.0


def hardware(inner: float = 376e9, outer: float | None = 45e9, domain: int = 8) -> Hardware:
    return Hardware(
        "test",
        80 << 30,
        3e12,
        {"bfloat16": 770e12, "float8_e4m3fn": 1350e12},
        domain,
        Link("inner", inner, 3e-6),
        None if outer is None else Link("outer", outer, 4e-6),
    )


@pytest.mark.parametrize(
    ("ranks", "row_bytes", "floor_us"),
    [(2, FP8_ROW, 80), (4, FP8_ROW, 218), (8, FP8_ROW, 373), (8, BF16_ROW, 724)],
)
def test_normal_mode_stays_above_the_wire(ranks: int, row_bytes: float, floor_us: float) -> None:
    rows = spread(FLAT, ranks, 8, "normal", redundant=False)
    wire = 4096 * row_bytes * rows.inner / 376e9
    assert wire * 1e6 == pytest.approx(floor_us, rel=0.01)
    seconds = exchange_s(rows, hardware(), "normal", row_bytes, 4096, DEFAULT)
    assert seconds > wire
    # The own rank's rows are staged too.
    staged = 4096 * row_bytes * rows.staged / (376e9 * DEFAULT.normal_efficiency)
    assert seconds == pytest.approx(staged + 3e-6)


def test_low_latency_sends_a_row_per_expert() -> None:
    rows = spread(MOE, 32, 8, "low_latency", redundant=False)
    assert rows.inner + rows.outer + 8 / 32 == pytest.approx(8.0)
    assert rows.outer == pytest.approx(8 * 0.75)
    seconds = exchange_s(rows, hardware(), "low_latency", FP8_ROW, 128, DEFAULT)
    assert seconds == pytest.approx(128 * FP8_ROW * 6 / 45e9 + 4e-6 + DEFAULT.low_latency_outer_s)


def test_normal_mode_crosses_the_network_once_per_node() -> None:
    grouped = spread(MOE, 64, 8, "normal", redundant=False)
    flat = spread(FLAT, 64, 8, "normal", redundant=False)
    low_latency = spread(FLAT, 64, 8, "low_latency", redundant=False)
    assert grouped.outer <= 4 * 7 / 8 < flat.outer < low_latency.outer


def test_groups_do_not_confine_where_nodes_do_not_hold_whole_ones() -> None:
    # 9 nodes share 8 groups: a global balancer scatters them as soon as it has slots to spare.
    scattered = spread(MOE, 72, 8, "normal", redundant=True)
    assert scattered == spread(FLAT, 72, 8, "normal", redundant=True)
    assert spread(MOE, 64, 8, "normal", redundant=True).outer < scattered.outer


def test_the_slower_tier_counts() -> None:
    rows = spread(MOE, 16, 8, "normal", redundant=False)
    fast_network = exchange_s(rows, hardware(outer=1e15), "normal", BF16_ROW, 4096, DEFAULT)
    slow_network = exchange_s(rows, hardware(outer=1e9), "normal", BF16_ROW, 4096, DEFAULT)
    assert fast_network == pytest.approx(
        4096 * BF16_ROW * rows.staged / 376e9 / DEFAULT.normal_efficiency + 4e-6
    )
    assert slow_network == pytest.approx(4096 * BF16_ROW * rows.outer / 1e9 + 4e-6)


def test_the_busiest_rank_receives_more() -> None:
    rows = spread(FLAT, 8, 8, "normal", redundant=False)
    even, skewed = (
        exchange_s(rows, hardware(), "normal", BF16_ROW, 4096, DEFAULT, imbalance) - 3e-6
        for imbalance in (1.0, 1.5)
    )
    assert skewed == pytest.approx(1.5 * even)


def test_one_rank_exchanges_nothing() -> None:
    rows = spread(MOE, 1, 8, "normal", redundant=False)
    assert exchange_s(rows, hardware(), "normal", BF16_ROW, 4096, DEFAULT) == 0.0


def test_all_reduce_is_a_ring() -> None:
    assert all_reduce_s(1e9, 1, hardware()) == 0.0
    assert all_reduce_s(1e9, 8, hardware()) == pytest.approx(2 * 7 / 8 * 1e9 / 376e9 + 2 * 3 * 3e-6)
    # Beyond a node every network link carries the ring of its GPU.
    assert all_reduce_s(1e9, 32, hardware()) == pytest.approx(
        2 * 31 / 32 * 1e9 / (8 * 45e9) + 2 * 5 * 4e-6
    )


def test_ep_beside_tp() -> None:
    spec = load_model("deepseek-v3")
    sizes = [2, 4, 8, 16, 32, 64]
    table = communication_table(spec, hardware(), sizes, tokens_per_gpu=1024)
    assert [row.gpus for row in table] == sizes
    for row in table:
        n = row.gpus
        assert row.tp_bytes == pytest.approx(2 * (n - 1) / n * n * 1024 * 2 * 7168)
        # A token never becomes more rows than it has experts, in either direction.
        assert row.ep_inner_bytes + row.ep_outer_bytes < 2 * 16 * 1024 * 2 * 7168
    times = [row.tp_s / row.ep_s for row in table]
    assert times[0] < 1 < times[-1]  # TP is the cheaper one on two GPUs and by far not on 64
    assert math.isclose(table[0].ep_outer_bytes, 0.0)


def test_no_network_is_said() -> None:
    with pytest.raises(ConfigError, match="no network"):
        communication_table(load_model("deepseek-v3"), hardware(outer=None), [16], tokens_per_gpu=8)
