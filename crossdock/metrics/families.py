"""Metric families under the prefix `crossdock:`, from plain numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from crossdock.metrics.rebalances import Rebalances

Samples = Iterable[tuple[tuple[str, ...], float]]


def counter(name: str, what: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"crossdock:{name}", what, labels=labels), samples)


def gauge(name: str, what: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"crossdock:{name}", what, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


def histogram(
    name: str, what: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    family = HistogramMetricFamily(f"crossdock:{name}", what)
    cumulative = np.cumsum(counts).tolist()
    edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric([], list(zip(edges, cumulative, strict=True)), total)
    return family


def kv_families(gauges: Sequence[dict[str, float]]) -> Iterator[Metric]:
    """`gauges`: of each rank's scheduler."""

    def total(name: str) -> float:
        return sum(g.get(name, 0) for g in gauges)

    yield gauge(
        "kv_pages",
        "KV pages over all ranks: used by sequences, cached for their prefix alone, free.",
        ["state"],
        [((state,), total(f"pages_{state}")) for state in ("used", "cached", "free")],
    )
    yield gauge(
        "kv_pages_reserved",
        "Of the free and the cached pages, those still due to prompts that are running.",
        [],
        [((), total("pages_reserved"))],
    )
    yield gauge(
        "kv_tokens",
        "Tokens in used KV pages, over all ranks; the rest of these pages is page rounding.",
        [],
        [((), total("kv_tokens"))],
    )
    yield gauge(
        "kv_page_size_tokens",
        "Tokens of a KV page.",
        [],
        [((), max((g.get("page_size", 0) for g in gauges), default=0))],
    )


def altering_families(
    altering: Mapping[str, float], dropped: float, gauges: Sequence[Mapping[str, float]]
) -> Iterator[Metric]:
    """`gauges`: of each rank's router."""
    yield gauge(
        "answers_altered_by",
        "Settings by which an answer depends on what else is served, where they are set: their "
        "values.",
        ["setting"],
        [((name,), value) for name, value in altering.items()],
    )
    yield counter(
        "dropped_tokens_total",
        "Choices of an expert that were not computed because it was over its capacity (one token "
        "counts up to top-k times), over all layers.",
        [],
        [((), dropped)],
    )
    bias = [g for g in gauges if "router_bias_updates" in g]
    yield gauge(
        "router_bias_updates",
        "Times that the routers' bias was adjusted since the start.",
        [],
        [((), max(g["router_bias_updates"] for g in bias))] if bias else [],
    )
    yield gauge(
        "router_bias_largest",
        "How far the bias of any expert is from the model's own now.",
        [],
        [((), max(g["router_bias_largest"] for g in bias))] if bias else [],
    )


def overlap_families(steps_R: Mapping[str, Iterable[float]]) -> Iterator[Metric]:
    """`steps_R`: by mode, the steps of each rank, all of which take part in every step."""
    yield counter(
        "overlap_steps_total",
        "Steps by what was done while rows travelled: nothing (off), the shared expert (sbo), the "
        "other half of the batch (tbo).",
        ["mode"],
        [((mode,), max(steps, default=0)) for mode, steps in steps_R.items()],
    )


def rebalance_families(record: Rebalances) -> Iterator[Metric]:
    yield counter(
        "rebalance_total",
        "Times that a placement of the experts was planned: moved to, nothing better (or not worth "
        "it), or failed, which left the old one serving.",
        ["result"],
        [((result,), count) for result, count in record.results.items()],
    )
    seconds = record.seconds
    yield histogram(
        "rebalance_seconds",
        "From the start to the end of moving experts, steps going on, in seconds.",
        seconds.bounds,
        seconds.counts,
        seconds.sum,
    )
    yield counter(
        "rebalance_moved_bytes_total", "Bytes of experts moved.", [], [((), record.moved_bytes)]
    )
    for name, what, gain in (
        ("predicted", "as planned for the window before it", record.predicted_gain),
        ("measured", "the first window with it against that window", record.measured_gain),
    ):
        yield gauge(
            f"rebalance_{name}_gain",
            "Balancedness of all layers together with the placement last moved to, over the one "
            f"before, less 1: {what}.",
            [],
            [] if gain is None else [((), gain)],
        )
    yield gauge(
        "rebalance_threshold",
        "Imbalance (a rank's most load over the mean, mean of layers) from which experts may move.",
        [],
        [((), record.threshold)],
    )
