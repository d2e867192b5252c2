"""One rank's step. Of the other ranks it knows only what the lockstep tells: a few numbers."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossdock.comm import World
from crossdock.core import (
    ConfigError,
    OverlapMode,
    Plan,
    Request,
    TokenOutput,
    Transport,
)
from crossdock.core.batch import GraphSize
from crossdock.engine.group import Inbox
from crossdock.engine.overlap import OverlapPolicy
from crossdock.engine.rebalance import Ended, Rebalancer
from crossdock.engine.router_bias import BiasAdjuster
from crossdock.engine.runner import How, Launched, Runner
from crossdock.metrics import Recorder, StepTimer
from crossdock.scheduler import Scheduler


@dataclass(frozen=True)
class Agreed:
    """What all ranks do now, decided alike by each from the same table. `most_tokens`: of any rank,
    with "tbo" of any half. `graph`: what is replayed."""

    run: bool
    sleep: bool
    most_tokens: int
    overlap: OverlapMode
    graph: GraphSize | None = None


WORDS = 5
"""What `agree` reads of each rank."""


def agree(
    table: list[tuple[int, ...]],
    policy: OverlapPolicy,
    fit: Callable[[int, int], GraphSize | None] = lambda need, tokens: None,
) -> Agreed:
    """`table[r]` = (has work, wave, tokens, tokens of the first half, what graphs it needs).
    `fit`: the graph for the most that any rank needs and the most tokens, if there is one.

    Sleeping needs that nobody has work *and* that all saw the same wave: else a request announced
    to some but not yet to its rank would be missed.
    """
    work = any(row[0] for row in table)
    same_wave = len({row[1] for row in table}) == 1
    most = max(row[2] for row in table)
    graph = fit(max(row[4] for row in table), most) if most else None
    replayed = None if graph is None else policy.choose_graph(graph)
    if graph is not None and replayed is not None:
        return Agreed(True, not work and same_wave, graph.rows, replayed, graph)
    first, second = max(row[3] for row in table), max(row[2] - row[3] for row in table)
    overlap = policy.choose(most, first, second)
    return Agreed(
        run=most > 0,
        sleep=not work and same_wave,
        most_tokens=max(first, second) if overlap == "tbo" else most,
        overlap=overlap,
    )


@dataclass(frozen=True)
class Step:
    outputs: list[TokenOutput]
    sleep: bool


class Engine:
    def __init__(
        self,
        world: World,
        scheduler: Scheduler,
        inbox: Inbox,
        runner: Runner,
        transport: Transport,
        recorder: Recorder,
        timer: StepTimer,
        rebalancer: Rebalancer | None,
        overlap: OverlapPolicy,
        adjuster: BiasAdjuster | None,
        info: dict[str, Any],
    ):
        """On a GPU the next step is planned and launched before the tokens of the one before are
        known."""
        self.world, self.scheduler, self.inbox, self.runner = world, scheduler, inbox, runner
        self.transport, self.recorder, self.info = transport, recorder, info
        self.timer, self.ahead = timer, 1 if world.device.type == "cuda" else 0
        self._in_flight = deque[Launched]()
        self.rebalancer, self.rebalanced = rebalancer, list[Ended]()
        self.overlap, self.adjuster = overlap, adjuster
        self.overlap_steps = dict[OverlapMode, int].fromkeys(("off", "sbo", "tbo"), 0)
        self.wave = 0
        self.steps = 0
        self.leads = world.rank % world.tp == 0  # the others of its group would say it again
        if self.leads:
            recorder.source("scheduler", scheduler.stats)
        recorder.source("overlap_steps", lambda: dict(self.overlap_steps))
        sent = transport.bytes_sent()  # before the first step: by nothing that was asked for
        recorder.source(
            "all_to_all_bytes",
            lambda: {path: n - sent[path] for path, n in transport.bytes_sent().items()},
        )

    def add(self, request: Request) -> None:
        self.inbox.add(request)

    def abort(self, request_id: str) -> None:
        self.inbox.abort(request_id)

    def rebalance(self, epoch: int, slot_expert_LP: np.ndarray, wave: int) -> None:
        """Begins to move; how it ended appears in `rebalanced`.

        Raises:
            ConfigError: the engine was built without, or cannot have this placement.
        """
        self.wake(wave)
        if self.rebalancer is None:
            raise ConfigError('the engine was started with rebalance = "off"')
        self.rebalancer.begin(epoch, slot_expert_LP)

    def wake(self, wave: int) -> None:
        self.wave = max(self.wave, wave)

    def step(self) -> Step:
        with self.recorder.host("step"):
            plan = self.scheduler.plan()
            cut = self.overlap.cut(plan)
            agreed = self._agree(plan, cut)
            self.scheduler.advance(plan)
            if agreed.run:
                self.overlap_steps[agreed.overlap] += 1
                self._in_flight.append(self._launch(plan, agreed, cut))
            else:
                self._in_flight.append(Launched(plan, tuple, self.transport.check))
            outputs: list[TokenOutput] = []
            while len(self._in_flight) > (self.ahead if agreed.run else 0):
                done = self._in_flight.popleft()
                outputs += self.scheduler.observe(done.plan, done.read())
            self.timer.collect()
            return Step(outputs if self.leads else [], agreed.sleep)

    def _launch(self, plan: Plan, agreed: Agreed, cut: int) -> Launched:
        how = How(agreed.most_tokens, agreed.overlap, cut, agreed.graph)
        timer, graphs = self.timer, self.runner.graphs
        timer.begin(self.steps, plan)
        timed = timer.timed and graphs is not None and agreed.graph is not None
        if timed:
            assert graphs is not None and agreed.graph is not None
            timer.replays(graphs.timing(agreed.graph, agreed.overlap))
        launched = self.runner.launch(plan, how, timed)
        timer.end()
        return launched

    def _agree(self, plan: Plan, cut: int) -> Agreed:
        self.steps += 1
        self.world.board.enter("agree", step=self.steps)
        mover, inbox, timer = self.rebalancer, self.inbox, self.timer
        busy = bool(self.scheduler.has_work or self._in_flight or inbox.waits)
        busy = busy or (mover is not None and mover.busy)
        graphs = self.runner.graphs
        need = 0 if graphs is None else graphs.need(plan)
        moved, told = mover.words() if mover else (), timer.words()
        wish = (int(busy), self.wave, plan.num_tokens, cut, need)
        start = time.perf_counter()
        table = self.world.lockstep.exchange((*wish, *told, *moved, *inbox.words(plan)))
        seconds = time.perf_counter() - start
        self.recorder.observe("agree", seconds)
        if self.world.size > 1:  # all but some microseconds of it
            self.recorder.observe("wait", seconds)
        a, b = WORDS + len(told), WORDS + len(told) + len(moved)
        timer.heard([row[WORDS:a] for row in table])
        if mover is not None and (ended := mover.advance([row[a:b] for row in table])):
            self.rebalanced.append(ended)
        tokens = sum(row[2] for row in table[:: self.world.tp])
        if tokens:
            self.recorder.histograms["iteration_tokens"].observe(tokens)
        if self.adjuster is not None:
            self.adjuster.advance(tokens)
        inbox.advance([row[b:] for row in table])
        return agree(table, self.overlap, *(() if graphs is None else (graphs.fit,)))

    def close(self) -> None:
        self.transport.close()
