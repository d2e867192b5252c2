"""The event loop: arrivals, steps and KV transfers in the order of a fake clock."""

import gc
import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from crossdock.core import Request, SamplingParams, TokenOutput
from crossdock.planner.simulate.config import Pool, SimConfig
from crossdock.planner.simulate.experts import ExpertState
from crossdock.planner.simulate.instance import TOKEN, Instance
from crossdock.planner.simulate.result import Record, Series, SimResult
from crossdock.planner.simulate.summary import summarize
from crossdock.planner.simulate.traffic import Arrival
from crossdock.scheduler import Router

LEAST_INTERVAL_S = 1e-3
"""Between two entries of the series."""


def simulate(
    config: SimConfig, on_progress: Callable[[float], None] = lambda share: None
) -> SimResult:
    """Runs until every request has ended. Equal configs (with an equal `step_time`) give equal
    results.

    Args:
        on_progress: told the share of the arrivals that is done.
    """
    with _no_collector():
        return _Run(config, on_progress).result()


@contextmanager
def _no_collector() -> Iterator[None]:
    """A run makes no cycles worth collecting, and walking all page lists again and again would make
    its time grow faster than its steps."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PoolState:
    """One pool: its instances, and the router over all their groups."""

    def __init__(self, config: SimConfig, pool: Pool, clock: _Clock, caching: bool, seed: int):
        self.pool = pool
        self.stand_for = config.stand_for
        self.end_s = 0.0
        self.awaiting: set[str] = set()
        self._group_of: dict[str, int] = {}
        self.experts: list[ExpertState] = []
        self.instances = [
            Instance(
                pool,
                config.step_time,
                clock,
                stand_for=config.stand_for,
                prefix_caching=caching,
                experts=self._experts(config, seed + index),
            )
            for index in range(pool.instances)
        ]
        self.groups = pool.layout.dp // config.stand_for
        self.router = Router(
            pool.instances * self.groups,
            page_size=pool.page_size,
            max_num_seqs=pool.max_num_seqs,
            kv_pages=pool.kv_tokens // pool.page_size,
            prefix_caching=caching,
        )

    def _experts(self, config: SimConfig, seed: int) -> ExpertState | None:
        if config.experts is None:
            return None
        layout = self.pool.layout
        num_experts = config.experts.inclusion_WLE.shape[2]
        slots = -(-num_experts // layout.gpus) + layout.redundant_per_rank
        rng = np.random.default_rng([config.seed, seed])
        state = ExpertState(config.experts, layout.gpus, slots, config.rebalance, rng)
        self.experts.append(state)
        return state

    def add(self, request: Request, *, imported: bool) -> Instance:
        tokens = (*request.prompt_ids, *request.emitted)
        group = self.router.route(request.id, tokens, request.params.max_tokens or 1)
        self.awaiting.add(request.id)
        self._group_of[request.id] = group
        instance = self.instances[group // self.groups]
        instance.add(group % self.groups, request, imported=imported)
        return instance

    def release(self, request_id: str) -> int:
        """Its group, over all instances."""
        self.router.release(request_id)
        self.awaiting.discard(request_id)
        return self._group_of.pop(request_id)


class _Run:
    def __init__(self, config: SimConfig, on_progress: Callable[[float], None]):
        self.config = config
        self.on_progress = on_progress
        self.clock = _Clock()
        self.arrivals = _one_in(config.arrivals, config.stand_for, config.seed)
        self.caching = any(a.prefix is not None for a in self.arrivals)
        self.pools = [
            # KV that comes from elsewhere is not looked up by its prefix.
            PoolState(config, pool, self.clock, self.caching and index == 0, 1000 * index)
            for index, pool in enumerate(config.pools)
        ]
        self.records = [Record(a.time_s, a.isl, a.osl) for a in self.arrivals]
        self.transfers_s: list[float] = []
        self._link_free_s: dict[int, float] = {}
        self._prompts = _Prompts()
        self._params: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._samples: list[tuple[float, int, int, list[float]]] = []
        self._interval = max(self.arrivals[-1].time_s / config.series_points, LEAST_INTERVAL_S)
        self._queued = self._open = 0

    def result(self) -> SimResult:
        self._run()
        names = [state.pool.layout.role for state in self.pools]
        times, queued, opened, used = zip(*self._samples, strict=True)
        kv = dict(zip(names, (tuple(u) for u in zip(*used, strict=True)), strict=True))
        k = self.config.stand_for
        series = Series(times, tuple(k * q for q in queued), tuple(k * o for o in opened), kv)
        return summarize(self.config, self.records, self.pools, self.transfers_s, series)

    def _at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), what))

    def _run(self) -> None:
        self._at(0.0, self._sample)
        coming = 0
        while coming < len(self.arrivals) or self._events:
            if coming < len(self.arrivals) and (
                not self._events or self.arrivals[coming].time_s <= self._events[0][0]
            ):
                self.clock.now = self.arrivals[coming].time_s
                self._arrive(coming)
                coming += 1
            else:
                self.clock.now, _, what = heapq.heappop(self._events)
                what()
        for state in self.pools:
            state.end_s = self.clock.now

    def _sample(self) -> None:
        used = []
        for state in self.pools:
            pools = [s.pool for i in state.instances for s in i.schedulers]
            used.append(sum(p.num_used for p in pools) / sum(p.num_pages for p in pools))
        self._samples.append((self.clock.now, self._queued, self._open, used))
        last = self.arrivals[-1].time_s
        self.on_progress(min(1.0, self.clock.now / last) if last else 1.0)
        if len(self._samples) > 2 * self.config.series_points:  # the end lies far behind the last
            self._samples = self._samples[::2]
            self._interval *= 2
        if self._open or self.clock.now < last:
            self._at(self.clock.now + self._interval, self._sample)

    def _arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        osl = arrival.osl if len(self.pools) == 1 else 1
        prompt = self._prompts.of(arrival, index if self.caching else None)
        self._queued += 1
        self._open += 1
        self._send(0, Request(str(index), prompt, self._sampling(osl)), imported=False)

    def _sampling(self, osl: int) -> SamplingParams:
        if osl not in self._params:
            self._params[osl] = SamplingParams(max_tokens=osl, ignore_eos=True)
        return self._params[osl]

    def _send(self, pool: int, request: Request, *, imported: bool) -> None:
        instance = self.pools[pool].add(request, imported=imported)
        if not instance.running:
            instance.running = True
            self._at(self.clock.now, lambda: self._step(pool, instance))  # after all that come now

    def _step(self, pool: int, instance: Instance) -> None:
        seconds = instance.begin()
        self._at(self.clock.now + seconds, lambda: self._stepped(pool, instance))

    def _stepped(self, pool: int, instance: Instance) -> None:
        state = self.pools[pool]
        for output in instance.finish():
            if output.request_id in state.awaiting:
                state.awaiting.discard(output.request_id)
                self._started(state, output)
            if output.finish_reason is not None:
                self._ended(pool, output)
        if instance.has_work:
            self._step(pool, instance)

    def _started(self, state: PoolState, output: TokenOutput) -> None:
        state.router.started(output.request_id)
        record = self.records[int(output.request_id)]
        if math.isnan(record.first_s):
            self._queued -= 1
            record.first_s = self.clock.now

    def _ended(self, pool: int, output: TokenOutput) -> None:
        group = self.pools[pool].release(output.request_id)
        record = self.records[int(output.request_id)]
        if output.error is None and pool + 1 < len(self.pools) and record.osl > 1:
            self._transfer(int(output.request_id), group)
            return
        record.end_s = self.clock.now
        record.error = output.error
        self._open -= 1

    def _transfer(self, index: int, group: int) -> None:
        """Send a request's KV from prefill group `group`; it decodes once that has come."""
        link = self.config.kv_link
        assert link is not None
        record = self.records[index]
        begin = max(self.clock.now, self._link_free_s.get(group, 0.0))
        sent = begin + record.isl * link.bytes_per_token / link.bytes_per_s
        self._link_free_s[group] = sent
        arrived = sent + link.latency_s
        self.transfers_s.append(arrived - self.clock.now)
        prompt = self._prompts.of(self.arrivals[index], None)
        request = Request(str(index), prompt, self._sampling(record.osl), emitted=(TOKEN.token_id,))
        self._at(arrived, lambda: self._send(1, request, imported=True))


def _one_in(arrivals: tuple[Arrival, ...], k: int, seed: int) -> tuple[Arrival, ...]:
    """One of every k in a row, by chance: bursts stay as likely as they were for a group, and long
    waves as high as they were for all."""
    if k == 1:
        return arrivals
    chosen = np.random.default_rng(seed).integers(k, size=-(-len(arrivals) // k))
    return tuple(arrivals[min(k * i + int(c), len(arrivals) - 1)] for i, c in enumerate(chosen))


class _Prompts:
    """Prompts as tokens. Only their beginnings matter, and only to prefix caches: a shared prefix
    is the same tokens, all else a request's own."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[int, ...]] = {}
        self._prefixes: dict[str, int] = {}

    def of(self, arrival: Arrival, own: int | None) -> tuple[int, ...]:
        """`own`: a number that no other request has, or None where no prefix is looked up."""
        if own is None:
            if arrival.isl not in self._plain:
                self._plain[arrival.isl] = (0,) * arrival.isl
            return self._plain[arrival.isl]
        shared = arrival.prefix_tokens
        prefix = 0
        if arrival.prefix is not None:
            prefix = self._prefixes.setdefault(arrival.prefix, len(self._prefixes))
        return (2 * prefix,) * shared + (2 * own + 1,) * (arrival.isl - shared)
