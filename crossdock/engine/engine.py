"""One rank's step. Of the other ranks it knows only what the lockstep tells: a few numbers."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossdock.comm import World
from crossdock.core import (
    ConfigError,
    OverlapMode,
    Plan,
    Request,
    Sampled,
    TokenOutput,
    Transport,
)
from crossdock.engine.overlap import OverlapPolicy
from crossdock.engine.rebalance import Ended, Rebalancer
from crossdock.engine.router_bias import BiasAdjuster
from crossdock.engine.runner import Runner
from crossdock.metrics import Recorder
from crossdock.scheduler import Scheduler


@dataclass(frozen=True)
class Agreed:
    """What all ranks do now, decided alike by each from the same table. `most_tokens`: of any rank,
    with "tbo" of any half."""

    run: bool
    sleep: bool
    most_tokens: int
    overlap: OverlapMode


def agree(table: list[tuple[int, ...]], policy: OverlapPolicy) -> Agreed:
    """`table[r]` = (has work, wave, tokens, tokens of the first half, ...).

    Sleeping needs that nobody has work *and* that all saw the same wave: else a request announced
    to some but not yet to its rank would be missed.
    """
    work = any(row[0] for row in table)
    same_wave = len({row[1] for row in table}) == 1
    most = max(row[2] for row in table)
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
        runner: Runner,
        transport: Transport,
        recorder: Recorder,
        rebalancer: Rebalancer | None,
        overlap: OverlapPolicy,
        adjuster: BiasAdjuster | None,
        info: dict[str, Any],
    ):
        self.world, self.scheduler, self.runner = world, scheduler, runner
        self.transport, self.recorder, self.info = transport, recorder, info
        self.rebalancer, self.rebalanced = rebalancer, list[Ended]()
        self.overlap, self.adjuster = overlap, adjuster
        self.overlap_steps = dict[OverlapMode, int].fromkeys(("off", "sbo", "tbo"), 0)
        self.wave = 0
        self.steps = 0
        recorder.source("scheduler", scheduler.stats)
        recorder.source("overlap_steps", lambda: dict(self.overlap_steps))
        sent = transport.bytes_sent()  # before the first step: by nothing that was asked for
        recorder.source(
            "all_to_all_bytes",
            lambda: {path: n - sent[path] for path, n in transport.bytes_sent().items()},
        )

    def add(self, request: Request, wave: int) -> None:
        self.scheduler.add(request)
        self.wake(wave)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

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
        with self.recorder.span("step"):
            plan = self.scheduler.plan()
            cut = self.overlap.cut(plan)
            agreed = self._agree(plan, cut)
            self.scheduler.advance(plan)
            sampled: list[Sampled | None] = [None] * len(plan.items)
            if agreed.run:
                self.overlap_steps[agreed.overlap] += 1
                sampled = self.runner.run(plan, agreed.most_tokens, agreed.overlap, cut)
            return Step(self.scheduler.observe(plan, sampled), agreed.sleep)

    def _agree(self, plan: Plan, cut: int) -> Agreed:
        self.steps += 1
        self.world.board.enter("agree", step=self.steps)
        mover = self.rebalancer
        busy = self.scheduler.has_work or (mover is not None and mover.busy)
        wish = (int(busy), self.wave, plan.num_tokens, cut, *(mover.words() if mover else ()))
        start = time.perf_counter()
        table = self.world.lockstep.exchange(wish)
        seconds = time.perf_counter() - start
        self.recorder.observe("agree", seconds)
        if self.world.size > 1:  # all but some microseconds of it
            self.recorder.observe("wait", seconds)
        if mover is not None and (ended := mover.advance([row[4:] for row in table])):
            self.rebalanced.append(ended)
        if self.adjuster is not None:
            self.adjuster.advance(sum(row[2] for row in table))
        return agree(table, self.overlap)

    def close(self) -> None:
        self.transport.close()
