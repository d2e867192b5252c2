"""The gateway's metrics in Prometheus' text format: what it saw of requests, and the ranks' own.

vLLM's names and meanings under the prefix `crossdock:`, and what an expert-parallel engine adds.
Nothing here keeps a counter of prometheus_client: families are built when somebody asks, so that a
token costs the server an addition.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from crossdock.core.ceilings import Ceilings
from crossdock.core.messages import Snapshot
from crossdock.metrics.expert_families import expert_families
from crossdock.metrics.families import (
    altering_families,
    counter,
    gauge,
    histogram,
    kv_families,
    rebalance_families,
)
from crossdock.metrics.rebalances import Rebalances
from crossdock.metrics.recent import Recent
from crossdock.metrics.recorder import Histogram
from crossdock.metrics.step_families import (
    activity_families,
    scalar,
    step_families,
    work_families,
)
from crossdock.metrics.totals import LoadWindow, Totals, arrays_of

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

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


@dataclass(frozen=True)
class Engine:
    """What the exposition must know of an engine. `snapshots` may wait some seconds for a rank.
    `altering`: the settings that change answers, and their values. `ceilings`: of a rank's device,
    None where nobody knows them."""

    snapshots: Callable[[], Sequence[Snapshot]]
    ranks: int
    top_k: int
    load_window_tokens: int
    rebalances: Rebalances | None = None
    altering: Mapping[str, float] = field(default_factory=dict)
    ceilings: Ceilings | None = None


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
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._totals = Totals()
        self._gauges: dict[int, dict[str, float]] = {}
        self._activity: dict[int, dict[str, float]] = {}
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._moe_layers: tuple[int, ...] = ()
        self._window: LoadWindow | None = None
        self._recent = Recent(clock)
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
                assert self._window is not None
                expert_LE = self._totals.sum("expert_tokens")
                yield from expert_families(expert_LE, self._moe_layers, self._window)
                yield from step_families(
                    self._totals, self._recent, self._bounds, self._engine.ranks
                )
                yield from work_families(self._recent, self._engine.ceilings)
                yield from activity_families(self._activity)
                dropped = scalar(self._totals.sum("dropped_tokens"))
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
            if "gpu_activity" in values:
                self._activity[snapshot.rank] = values["gpu_activity"]
            self._moe_layers = tuple(values.get("moe_layers", self._moe_layers))
            for name, h in values.get("histograms", {}).items():
                self._bounds[name] = tuple(h["bounds"])
        expert_LE = self._totals.sum("expert_tokens")
        slots_RL = list(self._totals.per_rank("slot_tokens").values())
        if expert_LE is not None and slots_RL:
            self._window.update(expert_LE, np.stack(slots_RL, axis=1))
        self._recent.remember(self._totals)

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
        usage = [g["kv_cache_usage_perc"] for g in gauges if "kv_cache_usage_perc" in g]
        yield gauge(
            "kv_cache_usage_perc",
            "Share of KV pages in use, 1 is all of them; mean over ranks.",
            [],
            [((), sum(usage) / len(usage) if usage else 0.0)],
        )
        for name, what in _SCHEDULER_COUNTERS.items():
            yield counter(name, what, [], [((), scalar(self._totals.sum(name)))])
        yield from kv_families(gauges)
