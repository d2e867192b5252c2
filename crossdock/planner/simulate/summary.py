"""From the requests' records and the pools' totals to a SimResult."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from crossdock.planner.simulate.config import SimConfig
from crossdock.planner.simulate.result import (
    PoolResult,
    Record,
    Series,
    SimResult,
    Spread,
    judge,
)

if TYPE_CHECKING:
    from crossdock.planner.simulate.run import PoolState


def summarize(
    config: SimConfig,
    records: Sequence[Record],
    pools: Sequence["PoolState"],
    transfers_s: Sequence[float],
    series: Series,
) -> SimResult:
    """Rates count what ended between the warm-up and the last arrival; latencies are of the
    requests that arrived then."""
    duration = records[-1].arrival_s
    warmup = duration / 10 if config.warmup_s is None else config.warmup_s
    verdict, growth, why = judge(records, duration, config.stand_for)
    finished = [r for r in records if r.error is None]
    counted = [r for r in finished if r.arrival_s >= warmup]
    ended = [r for r in finished if warmup <= r.end_s <= duration]
    k = config.stand_for
    per_s = k / (duration - warmup) if duration > warmup else float("nan")
    steady = verdict == "steady"
    output_rate = per_s * sum(r.osl for r in ended)
    gpus = sum(pool.gpus for pool in config.pools)
    return SimResult(
        verdict=verdict,
        why=why,
        duration_s=duration,
        requests=k * len(records),
        finished=k * len(finished),
        failed=k * (len(records) - len(finished)),
        offered_rate=k * len(records) / duration if duration else float("nan"),
        open_growth=growth,
        request_rate=per_s * len(ended) if steady else None,
        input_rate=per_s * sum(r.isl for r in ended) if steady else None,
        output_rate=output_rate if steady else None,
        output_rate_per_gpu=output_rate / gpus if steady else None,
        goodput=per_s * sum(_good(r, config) for r in ended) if steady else None,
        ttft_s=_spread((r.ttft_s for r in counted), steady),
        tpot_s=_spread((r.tpot_s for r in counted), steady),
        e2e_s=_spread((r.e2e_s for r in counted), steady),
        kv_transfer_s=Spread.of(transfers_s) if transfers_s else None,
        pools={state.pool.layout.role: _pool(state) for state in pools},
        series=series,
    )


def _spread(values: Iterable[float], steady: bool) -> Spread | None:
    return Spread.of(list(values)) if steady else None


def _good(record: Record, config: SimConfig) -> bool:
    """Limits that are not set are kept; so is TPOT by a single token."""
    ttft = config.ttft_s is None or record.ttft_s <= config.ttft_s
    return ttft and not (config.tpot_s is not None and record.tpot_s > config.tpot_s)


def _pool(state: "PoolState") -> PoolResult:
    totals = [i.totals for i in state.instances]
    stats = [s.stats() for i in state.instances for s in i.schedulers]
    steps = sum(t.steps for t in totals)
    busy_s = sum(t.busy_s for t in totals)
    asked = sum(s["prefix_cache_queries_total"] for s in stats)
    end_s = max((state.end_s, 1e-300))
    return PoolResult(
        gpus=state.pool.gpus,
        steps=steps,
        rank_steps=sum(i.rank_steps for i in state.instances),
        tokens=sum(t.tokens for t in totals),
        step_s=busy_s / max(steps, 1),
        busy=busy_s / len(totals) / end_s,
        fill=sum(t.sum_tokens for t in totals) / max(sum(t.max_tokens for t in totals), 1e-300),
        imbalance=sum(t.imbalance for t in totals) / max(steps, 1),
        preemptions=state.stand_for * int(sum(s["num_preemptions_total"] for s in stats)),
        prefix_hits=sum(s["prefix_cache_hits_total"] for s in stats) / asked if asked else 0.0,
        rebalances=sum(e.rebalances for e in state.experts),
        moved_bytes=sum(e.moved_bytes for e in state.experts),
    )
