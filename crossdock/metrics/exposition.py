"""The gateway's metrics in Prometheus' text format: what it saw of requests, and the ranks' own.

vLLM's names and meanings under the prefix `crossdock:`, and what an expert-parallel engine adds.
Nothing here keeps a counter of prometheus_client: families are built when somebody asks, so that a
token costs the server an addition.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from crossdock.core.messages import Snapshot
from crossdock.metrics.families import (
    altering_families,
    counter,
    gauge,
    histogram,
    kv_families,
    overlap_families,
    rebalance_families,
)
from crossdock.metrics.rebalances import Rebalances
from crossdock.metrics.recorder import EXCHANGE_BUCKETS_S, Histogram
from crossdock.metrics.totals import LoadWindow, Totals, arrays_of, balancedness, relative_std

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
RECENT_S = 30.0
"""Rates and shares called recent go back at least this far, or to the start of the gateway."""

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_QUEUE_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, *_REQUEST_BUCKETS_S)

_SCHEDULER_COUNTERS = {
    "num_preemptions_total": "Sequences whose KV pages were taken back; they are computed again.",
    "prompt_tokens_total": "Prompt tokens processed, those found in the prefix cache included.",
    "generation_tokens_total": "Tokens generated.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
}
_FINISH_REASONS = ("stop", "length", "abort", "error")
_OVERLAPS = ("off", "sbo", "tbo")
_PATHS = ("self", "node", "remote")


@dataclass(frozen=True)
class Engine:
    """What the exposition must know of an engine. `snapshots` may take up to half a second.
    `altering`: the settings that change answers, and their values."""

    snapshots: Callable[[], Sequence[Snapshot]]
    ranks: int
    top_k: int
    load_window_tokens: int
    rebalances: Rebalances | None = None
    altering: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reading:
    """Totals at one time, seconds by rank."""

    time: float
    prompt_tokens: float = 0
    generation_tokens: float = 0
    step_seconds: "dict[int, float] | None" = None
    wait_seconds: "dict[int, float] | None" = None
    steps: "dict[int, float] | None" = None


class GatewayMetrics(Collector):
    """Requests are told to it by the server's event loop; ranks are asked when it is scraped.

    `sample` takes a reading without exposing it; called now and then while tokens flow, it keeps
    windows and recent rates independent of how often anybody scrapes.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._totals = Totals()
        self._gauges: dict[int, dict[str, float]] = {}
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._moe_layers: tuple[int, ...] = ()
        self._window: LoadWindow | None = None
        self._readings = deque([_Reading(clock())])
        self.ttft = Histogram(_TTFT_BUCKETS_S)
        self.itl = Histogram(_ITL_BUCKETS_S)
        self.e2e = Histogram(_REQUEST_BUCKETS_S)
        self.queue = Histogram(_QUEUE_BUCKETS_S)
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._responses: dict[tuple[str, int], int] = {}
        self.registry = registry if registry is not None else CollectorRegistry()
        self.registry.register(self)

    # -- what the server tells -------------------------------------------------------------------

    def attach(self, engine: Engine) -> None:
        self._window = LoadWindow(engine.load_window_tokens, engine.top_k)
        self._engine = engine

    def first_token(self, seconds: float, queue_seconds: float) -> None:
        self.ttft.observe(seconds)
        self.queue.observe(queue_seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """`count` tokens that came together, `seconds` after those before them."""
        for _ in range(count):
            self.itl.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self.e2e.observe(seconds)

    def response(self, route: str, status: int) -> None:
        """`route` must be one of few: it becomes a label."""
        key = (route, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    # -- what a scrape asks ----------------------------------------------------------------------

    def expose(self) -> bytes:
        """The whole exposition. Blocks while ranks are asked: not for the event loop."""
        return generate_latest(self.registry)

    def sample(self) -> None:
        with self._lock:
            self._read()

    def collect(self) -> Iterator[Metric]:
        # One lock for all of it: an older snapshot taken after a newer one would look like a
        # restarted rank.
        with self._lock:
            self._read()
            yield from self._request_families()
            if self._engine is not None:
                yield from self._scheduler_families()
                yield from self._expert_families(self._engine)
                yield from self._rank_families(self._engine)
                dropped = _scalar(self._totals.sum("dropped_tokens"))
                gauges = list(self._gauges.values())
                yield from altering_families(self._engine.altering, dropped, gauges)
                if self._engine.rebalances is not None:
                    yield from rebalance_families(self._engine.rebalances)

    def _read(self) -> None:
        if self._engine is None or self._window is None:
            return
        for snapshot in self._engine.snapshots():
            values = snapshot.values
            self._totals.update(snapshot.rank, arrays_of(values, tuple(_SCHEDULER_COUNTERS)))
            self._gauges[snapshot.rank] = values.get("scheduler", {}) | values.get(
                "router_bias", {}
            )
            self._moe_layers = tuple(values.get("moe_layers", self._moe_layers))
            for name, h in values.get("histograms", {}).items():
                self._bounds[name] = tuple(h["bounds"])
        expert_LE = self._totals.sum("expert_tokens")
        slots_RL = list(self._totals.per_rank("slot_tokens").values())
        if expert_LE is not None and slots_RL:
            self._window.update(expert_LE, np.stack(slots_RL, axis=1))
        self._remember()

    def _remember(self) -> None:
        now, totals = self._clock(), self._totals
        self._readings.append(
            _Reading(
                now,
                _scalar(totals.sum("prompt_tokens_total")),
                _scalar(totals.sum("generation_tokens_total")),
                {r: float(v) for r, v in totals.per_rank("seconds.step").items()},
                {r: float(v) for r, v in totals.per_rank("seconds.wait").items()},
                {r: float(v) for r, v in totals.per_rank("steps").items()},
            )
        )
        while len(self._readings) > 2 and now - self._readings[1].time >= RECENT_S:
            self._readings.popleft()

    # -- families --------------------------------------------------------------------------------

    def _request_families(self) -> Iterator[Metric]:
        for name, what, h in (
            ("time_to_first_token_seconds", "From arrival to the first output token", self.ttft),
            ("inter_token_latency_seconds", "Between two output tokens of a sequence", self.itl),
            ("e2e_request_latency_seconds", "From arrival to the last output token", self.e2e),
            ("request_queue_time_seconds", "From arrival at a rank to the first step", self.queue),
        ):  # fmt: skip
            yield histogram(name, f"{what}, in seconds.", h.bounds, list(h.counts), h.sum)
        yield counter(
            "request_success_total",
            "Sequences that ended, by finish reason (abort: by the client or a shutdown).",
            ["finished_reason"],
            [((reason,), count) for reason, count in self._finished.items()],
        )
        yield counter(
            "http_responses_total",
            "HTTP responses by route and status (499: the client left first).",
            ["route", "status"],
            [((route, str(code)), n) for (route, code), n in list(self._responses.items())],
        )

    def _scheduler_families(self) -> Iterator[Metric]:
        gauges = [g for g in self._gauges.values() if g]
        for name, what in (
            ("num_requests_running", "Sequences being computed now, over all ranks."),
            ("num_requests_waiting", "Sequences that wait for room on a rank, over all ranks."),
        ):
            yield gauge(name, what, [], [((), sum(g.get(name, 0) for g in gauges))])
        usage = [g.get("kv_cache_usage_perc", 0.0) for g in gauges]
        yield gauge(
            "kv_cache_usage_perc",
            "Share of KV pages in use, 1 is all of them; mean over ranks.",
            [],
            [((), sum(usage) / len(usage) if usage else 0.0)],
        )
        for name, what in _SCHEDULER_COUNTERS.items():
            yield counter(name, what, [], [((), _scalar(self._totals.sum(name)))])
        yield from kv_families(gauges)

    def _expert_families(self, engine: Engine) -> Iterator[Metric]:
        window = self._window
        assert window is not None
        layers = [str(layer) for layer in self._moe_layers]
        expert_LE = self._totals.sum("expert_tokens")
        rows = [] if expert_LE is None else expert_LE.tolist()
        yield counter(
            "expert_tokens_total",
            "Tokens routed to each logical expert (one token counts top-k times); layer is the "
            "model's layer index.",
            ["layer", "expert"],
            [
                ((layer, str(expert)), count)
                for layer, row in zip(layers, rows, strict=False)
                for expert, count in enumerate(row)
            ],
        )
        over = "over the last closed window of crossdock:load_window_tokens (before: the open one)"
        for name, what, figures in (
            ("expert_load_std_dev", "Standard deviation of expert load over its mean",
             relative_std(window.shown_LE)),
            ("rank_load_std_dev", "Standard deviation of the ranks' expert load over its mean",
             relative_std(window.shown_LR)),
            ("expert_balancedness", "Mean over maximum of the ranks' expert load, 1 is even",
             balancedness(window.shown_LR)),
        ):  # fmt: skip
            pairs = zip(layers, figures, strict=False)
            samples = [((layer,), figure) for layer, figure in pairs if figure is not None]
            yield gauge(name, f"{what}, {over}.", ["layer"], samples)
        yield gauge(
            "idle_experts",
            f"Experts that no token was routed to, {over}.",
            ["layer"],
            [
                ((layer,), (row == 0).sum())
                for layer, row in zip(layers, window.shown_LE, strict=False)
            ],
        )
        yield gauge(
            "load_window_tokens",
            "Tokens per layer after which a load window closes.",
            [],
            [((), engine.load_window_tokens)],
        )
        yield gauge(
            "load_window_filled_tokens",
            "Tokens per layer in the open load window so far.",
            [],
            [((), window.filled)],
        )
        yield counter(
            "load_windows_total", "Load windows closed so far.", [], [((), window.closed)]
        )

    def _rank_families(self, engine: Engine) -> Iterator[Metric]:
        totals = self._totals
        yield counter(
            "rank_tokens_total",
            "Rows that the experts of each rank computed, over all layers.",
            ["rank"],
            [((str(r),), v.sum()) for r, v in totals.per_rank("slot_tokens").items()],
        )
        yield gauge(
            "rank_busy_ratio",
            f"Share of step time not spent waiting for other ranks, over the last {RECENT_S:.0f} s "
            "or more (without a step in them: since the start).",
            ["rank"],
            [((str(rank),), ratio) for rank, ratio in self._busy().items()],
        )
        yield gauge(
            "step_wait_seconds",
            f"What a step of each rank waits for other ranks, mean over the last {RECENT_S:.0f} s "
            "or more, in seconds.",
            ["rank"],
            [((str(rank),), wait) for rank, wait in self._waits().items()],
        )
        yield from overlap_families(
            {mode: map(float, totals.per_rank(f"overlap.{mode}").values()) for mode in _OVERLAPS}
        )
        for name in ("dispatch", "combine"):
            bounds = self._bounds.get(name, EXCHANGE_BUCKETS_S)
            counts, total = totals.sum(f"counts.{name}"), totals.sum(f"sum.{name}")
            yield histogram(
                f"{name}_seconds",
                f"Time of one {name} (one layer, one step) on a rank, waits included, in seconds.",
                bounds,
                [0] * (len(bounds) + 1) if counts is None else counts.tolist(),
                _scalar(total),
            )
        yield counter(
            "all_to_all_bytes_total",
            "Bytes sent by dispatch and combine: to itself, within the node, to another node.",
            ["path"],
            [((path,), _scalar(totals.sum(f"bytes.{path}"))) for path in _PATHS],
        )
        parts = sorted(n.removeprefix("seconds.") for n in totals.names() if n[:8] == "seconds.")
        yield counter(
            "step_seconds_total",
            "Seconds spent in each part of the steps, added over ranks; part 'step' is the whole, "
            "'wait' also counts in the part that waited.",
            ["part"],
            [((part,), _scalar(totals.sum(f"seconds.{part}"))) for part in parts],
        )
        for name, what, rate in zip(
            ("prefill_tpgs", "decode_tpgs"), ("Prompt", "Output"), self._rates(), strict=True
        ):
            yield gauge(
                name,
                f"{what} tokens per device and second, over the last {RECENT_S:.0f} s or more.",
                [],
                [((), rate / engine.ranks)],
            )

    def _busy(self) -> dict[int, float]:
        base, now = self._readings[0], self._readings[-1]
        ratios = {}
        for rank, step in (now.step_seconds or {}).items():
            wait = (now.wait_seconds or {}).get(rank, 0.0)
            recent_step = step - (base.step_seconds or {}).get(rank, 0.0)
            recent_wait = wait - (base.wait_seconds or {}).get(rank, 0.0)
            if recent_step > 0:
                step, wait = recent_step, recent_wait
            if step > 0:
                ratios[rank] = min(1.0, max(0.0, 1.0 - wait / step))
        return ratios

    def _waits(self) -> dict[int, float]:
        base, now = self._readings[0], self._readings[-1]
        waits = {}
        for rank, steps in (now.steps or {}).items():
            wait = (now.wait_seconds or {}).get(rank, 0.0)
            recent = steps - (base.steps or {}).get(rank, 0.0)
            if recent > 0:
                waits[rank] = (wait - (base.wait_seconds or {}).get(rank, 0.0)) / recent
            elif steps > 0:
                waits[rank] = wait / steps
        return waits

    def _rates(self) -> tuple[float, float]:
        """Prompt and output tokens per second."""
        base, now = self._readings[0], self._readings[-1]
        seconds = now.time - base.time
        if seconds <= 0:
            return 0.0, 0.0
        return (
            (now.prompt_tokens - base.prompt_tokens) / seconds,
            (now.generation_tokens - base.generation_tokens) / seconds,
        )


def _scalar(value: np.ndarray | None) -> float:
    return 0.0 if value is None else float(value)
