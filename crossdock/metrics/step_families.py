"""Families of where the ranks' time goes."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from prometheus_client.core import Metric

from crossdock.core.ceilings import Ceilings
from crossdock.metrics.families import counter, gauge, histogram, overlap_families
from crossdock.metrics.recent import RECENT_S, Recent
from crossdock.metrics.recorder import EXCHANGE_BUCKETS_S, TOKEN_BUCKETS
from crossdock.metrics.totals import Totals

_OVERLAPS = ("off", "sbo", "tbo")
_PATHS = ("self", "node", "remote")
_LATELY = f"over the last {RECENT_S:.0f} s or more (without a step in them: since the start)"


def step_families(
    totals: Totals, recent: Recent, bounds: Mapping[str, tuple[float, ...]], ranks: int
) -> Iterator[Metric]:
    """`bounds`: of the ranks' histograms, by name."""
    yield counter(
        "rank_tokens_total",
        "Rows that the experts of each rank computed, over all layers.",
        ["rank"],
        [((str(r),), v.sum()) for r, v in totals.per_rank("slot_tokens").items()],
    )
    yield from _wait_families(recent)
    yield from overlap_families(
        {mode: map(float, totals.per_rank(f"overlap.{mode}").values()) for mode in _OVERLAPS}
    )
    yield from _exchange_families(totals, bounds)
    yield _size_family(totals)
    yield from _part_families(totals, recent)
    for name, what, tokens in (
        ("prefill_tpgs", "Prompt", "prompt_tokens_total"),
        ("decode_tpgs", "Output", "generation_tokens_total"),
    ):
        yield gauge(
            name,
            f"{what} tokens per device and second, over the last {RECENT_S:.0f} s or more.",
            [],
            [((), recent.rate(tokens) / ranks)],
        )


def _wait_families(recent: Recent) -> Iterator[Metric]:
    waited = recent.per_rank("seconds.wait", "seconds.step")
    yield gauge(
        "rank_busy_ratio",
        f"Share of step time not spent waiting for other ranks, {_LATELY}.",
        ["rank"],
        [((str(rank),), min(1.0, max(0.0, 1.0 - share))) for rank, share in waited.items()],
    )
    yield gauge(
        "step_wait_seconds",
        f"What a step of each rank waits for other ranks, mean over the last {RECENT_S:.0f} s "
        "or more, in seconds.",
        ["rank"],
        [((str(rank),), wait) for rank, wait in recent.per_rank("seconds.wait", "steps").items()],
    )


def _exchange_families(totals: Totals, bounds: Mapping[str, Sequence[float]]) -> Iterator[Metric]:
    for name in ("dispatch", "combine"):
        edges = bounds.get(name, EXCHANGE_BUCKETS_S)
        counts, total = totals.sum(f"counts.{name}"), totals.sum(f"sum.{name}")
        yield histogram(
            f"{name}_seconds",
            f"Time of one {name} (one layer, one step) on a rank, waits included, in seconds.",
            edges,
            [0] * (len(edges) + 1) if counts is None else counts.tolist(),
            scalar(total),
        )
    yield counter(
        "all_to_all_bytes_total",
        "Bytes sent by dispatch and combine: to itself, within the node, to another node.",
        ["path"],
        [((path,), scalar(totals.sum(f"bytes.{path}"))) for path in _PATHS],
    )


def _size_family(totals: Totals) -> Metric:
    counts = next(iter(totals.per_rank("counts.iteration_tokens").values()), None)
    tokens = next(iter(totals.per_rank("sum.iteration_tokens").values()), None)
    return histogram(
        "iteration_tokens_total",
        "Tokens of a step, of all ranks together.",
        TOKEN_BUCKETS,
        [0] * (len(TOKEN_BUCKETS) + 1) if counts is None else counts.tolist(),
        scalar(tokens),
    )


def _part_families(totals: Totals, recent: Recent) -> Iterator[Metric]:
    parts = sorted(n.removeprefix("seconds.") for n in totals.names() if n[:8] == "seconds.")
    yield counter(
        "step_seconds_total",
        "Seconds spent in each part of the steps that were timed (CPU ranks: all; GPU ranks: every "
        "hundredth), added over ranks; part 'step' is the whole, 'wait' also counts in the part "
        "that waited.",
        ["part"],
        [((part,), scalar(totals.sum(f"seconds.{part}"))) for part in parts],
    )
    yield counter(
        "timed_steps_total",
        "Steps that crossdock:step_seconds counts, added over ranks.",
        [],
        [((), scalar(totals.sum("steps")))],
    )
    shares = [
        recent.over_ranks(f"seconds.{name}", "seconds.step") for name in ("dispatch", "combine")
    ]
    known = [share for share in shares if share is not None]
    yield gauge(
        "exposed_communication_ratio",
        "Share of step time in which a rank does nothing but dispatch and combine, or wait in them "
        f"for other ranks, {_LATELY}.",
        [],
        [((), sum(known))] if known else [],
    )


def work_families(recent: Recent, ceilings: Ceilings | None) -> Iterator[Metric]:
    """`ceilings` None: nobody knows what the ranks' devices reach."""
    for name, what, done, most in (
        ("mfu", "Floating-point operations that the model needs", "timed_flops", "flops_per_s"),
        ("mbu", "Bytes of weights and KV that have to be read", "timed_bytes", "bytes_per_s"),
    ):
        per_ns = recent.over_ranks(done, "timed_ns")
        known = ceilings is not None and per_ns is not None
        yield gauge(
            name,
            f"{what}, per second and rank, as a share of what the device was measured to reach "
            f"(crossdock:ceiling), of every hundredth step, {_LATELY}.",
            [],
            [((), (per_ns or 0.0) * 1e9 / getattr(ceilings, most))] if known else [],
        )
    yield gauge(
        "ceiling",
        "What a rank's device reaches at best, as measured: operations per second of a large "
        "matrix product, bytes per second of a large copy, read and written.",
        ["what", "source"],
        []
        if ceilings is None
        else [
            (("flops_per_s", ceilings.source), ceilings.flops_per_s),
            (("bytes_per_s", ceilings.source), ceilings.bytes_per_s),
        ],
    )


def activity_families(activity: Mapping[int, Mapping[str, float]]) -> Iterator[Metric]:
    """`activity`: by rank; empty where the driver does not offer it."""
    for name, what in (
        ("sm", "Share of time in which a multiprocessor had work, mean over multiprocessors"),
        ("tensor", "Share of the tensor cores' peak that was used"),
        ("dram", "Share of the memory's peak bandwidth that was used"),
    ):
        yield gauge(
            f"gpu_{name}_activity",
            f"{what}; between the last two readings of the rank's metrics, from the driver's "
            "performance monitor.",
            ["rank"],
            [((str(rank),), seen[name]) for rank, seen in sorted(activity.items()) if name in seen],
        )


def scalar(value: np.ndarray | None) -> float:
    return 0.0 if value is None else float(value)
