"""The recommended deployment in the simulator: what traffic, which pools, what came of it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.balance import POLICIES
from crossdock.core import ConfigError
from crossdock.planner.answer import Answer
from crossdock.planner.answer_document import number_text
from crossdock.planner.answer_tables import item
from crossdock.planner.calibration import DEFAULT
from crossdock.planner.memory import expert_bytes
from crossdock.planner.search_deployment import Deployment, Side
from crossdock.planner.simulate import (
    Arrival,
    KVLink,
    Pool,
    PricedSteps,
    Rebalance,
    SimConfig,
    SimResult,
    Spread,
    overlaps,
    poisson,
    ratios,
    read_trace,
    without_rebalancing,
    zipf_loads,
)

LAYERS = 8
"""MoE layers whose loads are drawn; the others are like them."""
LEAST_S, REQUESTS_LONG = 60.0, 8
"""Poisson traffic lasts a minute, or as long as this many requests take one after another."""
GROUPS = 8
"""Attention groups of an instance that are simulated; each stands for as many others."""
REBALANCE_S, REBALANCINGS = 600.0, 20
"""Seconds between two, or less where the traffic is too short for so many."""
DRIFT = 0.05
"""Share of the experts that exchange their popularity from one rebalancing to the next."""


def simulation(answer: Answer, traffic: str) -> SimConfig:
    """`traffic`: "poisson:RATE", "poisson:RATE:SECONDS" or a trace (JSON lines of `arrival_s`,
    `isl` and `osl`).

    Raises:
        ConfigError: it is none of these.
    """
    q, best = answer.question, answer.best
    pools = _pools(answer, best)
    link = q.hardware.outer or q.hardware.inner
    arrivals = _arrivals(answer, traffic)
    moved = None
    if best.kind == "split":
        moved = KVLink(
            q.spec.kv_bytes_per_token(q.formats.kv_dtype),
            link.bytes_per_s * best.prefill.point.layout.tp,
            link.latency_s,
        )
    experts = rebalance = None
    if best.experts == "ep" and any(pool.layout.gpus > 1 for pool in pools):
        interval_s = min(REBALANCE_S, max(1.0, arrivals[-1].time_s / REBALANCINGS))
        windows = 1 + math.ceil(arrivals[-1].time_s / interval_s)
        experts = zipf_loads(
            LAYERS,
            q.spec.moe.num_experts,
            q.spec.moe.top_k,
            q.work.zipf,
            windows=windows,
            window_s=interval_s,
            drift=DRIFT,
        )
        rebalance = Rebalance(
            POLICIES["eplb"],
            interval_s,
            expert_bytes(q.spec, q.formats.weights_dtype) // len(q.spec.moe_layers),
            link.bytes_per_s,
        )
    return SimConfig(
        arrivals=arrivals,
        pools=pools,
        step_time=PricedSteps(q.spec, q.hardware, DEFAULT),
        kv_link=moved,
        experts=experts,
        rebalance=rebalance,
        ttft_s=q.work.ttft_s,
        tpot_s=q.work.tpot_s,
        stand_for=max(1, math.gcd(*(pool.layout.dp for pool in pools)) // GROUPS),
    )


def _arrivals(answer: Answer, traffic: str) -> tuple[Arrival, ...]:
    kind, *numbers = traffic.split(":")
    if kind != "poisson":
        return read_trace(Path(traffic))
    work, best = answer.question.work, answer.best
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(math.isfinite(v) and v > 0 for v in values):
        raise ConfigError(
            f"--simulate {traffic!r}: expected poisson:RATE, poisson:RATE:SECONDS or a file"
        )
    long_s = REQUESTS_LONG * (best.ttft_s + work.osl * best.tpot_s)
    seconds = values[1] if len(values) == 2 else max(LEAST_S, long_s)
    arrivals = poisson(values[0], seconds, work.isl, work.osl)
    if not arrivals:
        raise ConfigError(
            f"--simulate {traffic!r}: no request arrives within {seconds:g} s; simulate longer, as "
            f"in poisson:{values[0]:g}:{100 / values[0]:.0f}"
        )
    return arrivals


def _pools(answer: Answer, best: Deployment) -> tuple[Pool, ...]:
    p, d = best.prefill, best.decode
    if best.kind == "together":
        layout = replace(p.point.layout, role="both", overlap=d.point.layout.overlap)
        kv_tokens = answer.memory["decode"].kv_tokens
        return (_pool(p, layout, kv_tokens, _sequences(d), p.point.batch),)
    at_once = 2 * max(1, math.ceil(p.point.batch * p.point.layout.tp / answer.question.work.isl))
    return (
        _pool(p, p.point.layout, answer.memory["prefill"].kv_tokens, at_once, p.point.batch),
        _pool(d, d.point.layout, answer.memory["decode"].kv_tokens, _sequences(d), d.most),
    )


def _sequences(side: Side) -> int:
    return max(1, math.ceil(side.most * side.point.layout.tp))


def _pool(side: Side, layout: Any, kv_tokens: int, sequences: int, tokens: float) -> Pool:
    return Pool(
        layout=layout,
        kv_tokens=kv_tokens,
        instances=side.instances,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(1, math.ceil(tokens * layout.tp)),
    )


def variants(config: SimConfig, what: str) -> dict[str, SimConfig]:
    """The same traffic otherwise: `what` is "rebalancing", "overlap" or "ratio".

    Raises:
        ConfigError: it is none of these, or the deployment has no such thing.
    """
    if what == "rebalancing":
        return without_rebalancing(config)
    if what == "overlap":
        busiest = len(config.pools) - 1
        return overlaps(config, busiest, ("off", "sbo", "tbo"))
    if what == "ratio":
        if len(config.pools) != 2:
            raise ConfigError("--compare ratio: both phases run on the same instances here")
        p, d = (pool.instances for pool in config.pools)
        return ratios(config, tuple((n, d + p - n) for n in range(1, p + d)))
    raise ConfigError(f"--compare {what!r}: expected rebalancing, overlap or ratio")


def compared_table(results: Mapping[str, SimResult]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("Compared", ""):
        table.add_column(column)
    for column in ("requests/s", "within\nlimits", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, r in results.items():
        if r.ttft_s is None or r.tpot_s is None or r.goodput is None or r.request_rate is None:
            table.add_row(f"  {name}", r.verdict)
            continue
        table.add_row(
            f"  {name}",
            r.verdict,
            f"{r.request_rate:,.4g}",
            f"{r.goodput:,.4g}",
            *(_ms(v) for v in (r.ttft_s.p50, r.ttft_s.p99, r.tpot_s.p50, r.tpot_s.p99)),
        )
    return table


def render(answer: Answer, result: SimResult, seconds: float) -> RenderableType:
    """Beside what the plan predicted; an overloaded system has no throughput."""
    steps = sum(pool.rank_steps for pool in result.pools.values())
    lines = [
        f"{result.requests:,} requests in {result.duration_s:,.0f} s of its time, {steps:,} "
        f"rank-steps, simulated in {seconds:,.1f} s: {result.verdict} ({result.why})",
    ]
    if result.output_rate_per_gpu is not None and result.goodput is not None:
        lines.append(
            f"{result.request_rate:,.4g} requests/s, {number_text(result.output_rate_per_gpu)} "
            f"output tokens/s per GPU; within the limits {result.goodput:,.4g} requests/s"
        )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("", "mean", "p50", "p90", "p99", f"plan, at {answer.best.rate:,.4g}/s"):
        table.add_column(column, justify="right" if column else "left")
    best = answer.best
    for name, spread, planned in (
        ("  TTFT, ms", result.ttft_s, best.ttft_s),
        ("  TPOT, ms", result.tpot_s, best.tpot_s),
        ("  KV transfer, ms", result.kv_transfer_s, None),
    ):
        if spread is not None:
            table.add_row(name, *_cells(spread), "" if planned is None else _ms(planned))
    pools = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in (
        "",
        "busy",
        "step ms",
        "fill",
        "imbalance",
        "KV used",
        "preempted",
        "rebalanced",
    ):
        pools.add_column(column, justify="right" if column else "left")
    for name, pool in result.pools.items():
        used = max(result.series.kv_used.get(name, (0.0,)), default=0.0)
        pools.add_row(
            f"  {name}",
            f"{pool.busy:.0%}",
            _ms(pool.step_s),
            f"{pool.fill:.0%}",
            f"{pool.imbalance:.2f}",
            f"{used:.0%} at most",
            f"{pool.preemptions:,}",
            f"{pool.rebalances:,}",
        )
    queued = max(result.series.queued, default=0)
    lines.append(f"at most {queued:,} requests waited for their first token at once")
    return Group(Text("Simulated", style="bold"), *(item(line) for line in lines), table, pools)


def _cells(spread: Spread) -> list[str]:
    return [_ms(v) for v in (spread.mean, spread.p50, spread.p90, spread.p99)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
