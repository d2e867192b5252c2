"""One instance on the fake clock: real schedulers in lockstep, one step time for all of them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from crossdock.core import Plan, Request, Sampled, TokenOutput
from crossdock.planner.simulate.config import Pool, StepLoad, StepTime
from crossdock.planner.simulate.experts import ExpertState
from crossdock.scheduler import Scheduler

TOKEN = Sampled(1)
IDLE = (0, 0, 0, 0)


@dataclass
class Totals:
    """`sum_tokens` over `max_tokens`: how evenly the groups' steps were filled."""

    steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    sum_tokens: float = 0.0
    max_tokens: float = 0.0
    imbalance: float = 0.0


class Instance:
    """`add` requests; `begin` a step, and `finish` it when its time has passed.

    Args:
        stand_for: groups of the instance for each simulated one.
        imported: ids whose KV comes with them (from a prefill pool): their prompt takes pages, as
            any, but no computing the first time.
    """

    def __init__(
        self,
        pool: Pool,
        step_time: StepTime,
        clock: Callable[[], float],
        *,
        stand_for: int,
        prefix_caching: bool,
        experts: ExpertState | None,
    ):
        self.pool = pool
        self.totals = Totals()
        self.imported: set[str] = set()
        self.running = False
        self._step_time = step_time
        self._clock = clock
        self._stand_for = stand_for
        self._experts = experts
        decode = pool.layout.role == "decode"
        self.schedulers = [
            Scheduler(
                max_num_seqs=pool.max_num_seqs,
                # Imported prompts are planned as chunks, which must not wait for a budget.
                max_num_batched_tokens=1 << 40 if decode else pool.max_num_batched_tokens,
                max_model_len=1 << 40,
                page_size=pool.page_size,
                num_pages=pool.kv_tokens // pool.page_size,
                prefix_caching=prefix_caching,
                clock=clock,
            )
            for _ in range(pool.layout.dp // stand_for)
        ]
        self._plans: list[tuple[Scheduler, Plan]] = []
        self._history: deque[np.ndarray] = deque(maxlen=stand_for)
        self._tokens: list[Sampled] = []

    @property
    def has_work(self) -> bool:
        """Also while only those groups have some that the simulated ones stand for."""
        last = list(self._history)[-(self._stand_for - 1) :] if self._stand_for > 1 else []
        others = any(load_G4.any() for load_G4 in last)
        return others or any(s.has_work for s in self.schedulers)

    @property
    def rank_steps(self) -> int:
        """Steps times ranks, those counted that a simulated one stands for."""
        return self.totals.steps * self.pool.layout.gpus

    def add(self, group: int, request: Request, *, imported: bool) -> None:
        if imported:
            self.imported.add(request.id)
        self.schedulers[group].add(request)

    def begin(self) -> float:
        """Plans a step on every group with work and returns its seconds (0 if there is nothing to
        compute, only endings to report)."""
        loads = []
        self._plans = []
        for scheduler in self.schedulers:
            if scheduler.has_work:
                plan = scheduler.plan()
                scheduler.advance(plan)
                self._plans.append((scheduler, plan))
                loads.append(self._load_of(plan))
            else:
                loads.append(IDLE)
        loads_G4 = np.array(loads, dtype=float)
        self.running = True
        self._history.append(loads_G4)
        if not any(load_G4.any() for load_G4 in self._history):
            return 0.0
        seconds = float(self._step_time(self.pool.layout, self._step_load()))
        self.totals.steps += 1
        self.totals.busy_s += seconds
        return seconds

    def _load_of(self, plan: Plan) -> tuple[int, int, int, int]:
        """decodes, their kv, chunk tokens, their query-key pairs."""
        items = plan.items
        singles = len(items)
        imported = kv = tokens = pairs = 0
        while singles and (count := len(items[singles - 1].tokens)) > 1:
            singles -= 1
            item = items[singles]
            if item.request.id in self.imported:
                self.imported.discard(item.request.id)
                imported += 1
                kv += count - 1
            else:
                tokens += count
                pairs += count * item.start + count * (count + 1) // 2
        kv += sum([item.start for item in items[:singles]])
        return singles + imported, kv, tokens, pairs

    def _step_load(self) -> StepLoad:
        load_G4 = np.concatenate(self._history)
        if len(self._history) < self._stand_for:  # at the start: what there is, over and over
            load_G4 = np.resize(load_G4, (self.pool.layout.dp, 4))
        tokens_G = load_G4[:, 0] + load_G4[:, 2]
        total = round(float(tokens_G.sum()))
        imbalance = self._experts.step(self._clock(), total) if self._experts else 1.0
        totals = self.totals
        totals.tokens += total
        totals.sum_tokens += float(tokens_G.mean())
        totals.max_tokens += float(tokens_G.max())
        totals.imbalance += imbalance
        decodes_G, kv_G, prefill_G, pairs_G = load_G4.T
        return StepLoad(decodes_G, kv_G, prefill_G, pairs_G, total, imbalance)

    def finish(self) -> Iterator[TokenOutput]:
        """What the step that `begin` planned gave."""
        self.running = False
        for scheduler, plan in self._plans:
            count = len(plan.items)
            if count > len(self._tokens):
                self._tokens = [TOKEN] * count
            yield from scheduler.observe(plan, self._tokens[:count])
