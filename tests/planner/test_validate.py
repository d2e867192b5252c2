"""The bounds that the cost model's error must keep, and that its fit is one."""

import math
from dataclasses import replace

import pytest

from crossdock.core import ConfigError
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.validate import (
    Row,
    document,
    median_error,
    rankings,
    validate,
    weaknesses,
)

FITTED = {
    "sustained_share": "engine",
    "overlap_efficiency": "engine",
    "layer_overhead_s": "engine",
    "real_traffic_imbalance": "engine",
    "real_traffic_zipf": "engine",
    "low_latency_inner_s": "exchange",
    "low_latency_outer_s": "exchange",
    "normal_efficiency": "exchange",
}
KINDS = {"engine": ("prefill", "decode", "ratio"), "exchange": ("dispatch", "combine")}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return validate()


def test_at_most_a_third_calibrates(rows: list[Row]) -> None:
    for kinds in (*KINDS.values(), ("product",)):
        of_kind = [row for row in rows if row.kind in kinds]
        assert 0 < sum(row.calibration for row in of_kind) <= len(of_kind) / 3
    assert not any(row.calibration for row in rows if row.kind == "run")


@pytest.mark.parametrize(
    "kind", [None, "prefill", "decode", "ratio", "run", "dispatch", "combine", "product"]
)
def test_held_out_median(kind: str | None) -> None:
    assert 0.0 < median_error(kind) <= 0.20


def test_none_beyond_half_without_a_cause(rows: list[Row]) -> None:
    far = [row.name for row in rows if abs(row.error) > 0.5 and not row.cause]
    assert far == []


def test_rows_with_full_context_are_enough(rows: list[Row]) -> None:
    """The median is not carried by rows that came with an excuse."""
    errors = sorted(
        abs(row.error)
        for row in rows
        if row.kind in KINDS["engine"] and not row.calibration and not row.cause
    )
    assert errors[len(errors) // 2] <= 0.20 and len(errors) >= 15


def test_rankings_are_right() -> None:
    wrong = [ranking.name for ranking in rankings() if not ranking.right]
    assert wrong == [] and len(rankings()) >= 9


def test_names_are_distinct_and_sources_said(rows: list[Row]) -> None:
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.source and row.published > 0 and row.predicted > 0 for row in rows)


def loss(calibration: Calibration, group: str) -> float:
    return sum(
        math.log(row.predicted / row.published) ** 2
        for row in validate(calibration)
        if row.calibration and row.kind in KINDS[group]
    )


@pytest.mark.parametrize("name", FITTED)
def test_fitted_numbers_are_at_the_optimum_of_the_calibration_rows(name: str) -> None:
    best = loss(DEFAULT, FITTED[name])
    for factor in (0.85, 1.18):
        moved = getattr(DEFAULT, name) * factor
        assert loss(replace(DEFAULT, **{name: moved}), FITTED[name]) > best


def test_document() -> None:
    made = document()
    for row in made["rows"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
        assert {"name", "predicted", "published", "error", "calibration", "source"} <= row.keys()
    assert made["median_absolute_error"]["decode"] == median_error("decode")
    assert made["calibration_share"] <= 1 / 3
    assert made["weak"] == list(weaknesses()) and len(made["weak"]) > 3


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: prefill"):
        median_error("training")
