"""Keeping the experts of a running engine balanced: reads loads, asks `control`, has them moved.

Off: nothing is read. Manual: windows are read, moves are made when asked for. Auto: a thread also
decides after each window.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np

from crossdock.control import (
    Decision,
    History,
    Proposal,
    Question,
    Reading,
    Window,
    enough,
    judged,
    moved,
)
from crossdock.core import Busy, ConfigError, CrossdockError, EngineConfig, Placement
from crossdock.core.messages import Rebalanced
from crossdock.launch.rebalance_planner import decide_elsewhere
from crossdock.metrics.rebalances import Rebalances

log = logging.getLogger(__name__)


class Mover(Protocol):
    """What is asked of an engine's client."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def read_rows(self) -> float: ...
    def reading(self) -> Reading:
        """Raises CrossdockError where a rank does not answer."""
        ...

    def rebalance(self, slot_expert_LP: np.ndarray, timeout: float | None = None) -> Rebalanced: ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """`plan` is None where none was made. `why`: what speaks for it, against it, or went wrong."""

    result: Literal["moved", "unchanged", "failed"]
    why: str
    plan: Proposal | None = None
    moved_bytes: int = 0
    seconds: float = 0.0


class Balancer:
    """One per client. Thread-safe; one move at a time."""

    def __init__(
        self,
        mover: Mover,
        clock: Callable[[], float] = time.monotonic,
        decide: Callable[[Question], Decision] | None = None,
    ):
        self.mover, self.config = mover, mover.config
        self.totals = Rebalances(mover.config.rebalance_threshold)
        self.history = History()
        self._one = threading.Lock()
        self._stop = threading.Event()
        self._clock, self._decide = clock, decide or partial(decide_elsewhere, stop=self._stop)
        self._base: Reading | None = None
        self._last: Window | None = None
        self._unjudged: tuple[float, float] | None = None
        """Balancedness before the last move, and the gain predicted of it."""

    def start(self) -> None:
        """The engine is ready."""
        if self.config.rebalance == "off":
            return
        self.begin_window()
        threading.Thread(target=self._run, daemon=True, name="balancer").start()

    def close(self) -> None:
        self._stop.set()

    def begin_window(self) -> None:
        """Forgets the load seen so far, and a last move that was not judged yet."""
        self._base, self._last, self._unjudged = self.mover.reading(), None, None

    def rebalance(self, policy: str | None = None) -> Outcome:
        """Plans from the load since the last window or move, and moves to what is better.

        Raises:
            Busy: a move is under way.
            ConfigError: rebalancing is off, an unknown policy, or no load to plan from.
            CrossdockError: the engine has failed.
        """
        if self.config.rebalance == "off":
            raise ConfigError(
                'rebalancing is off; start the engine with rebalance = "manual" or "auto" (in the '
                "file given by --config)"
            )
        if not self._one.acquire(blocking=False):
            raise Busy(
                "a move of experts is being planned or made already; ask again when that has ended"
            )
        try:
            return self._plan(self._window_to_plan(), policy or self.config.rebalance_policy)
        finally:
            self._one.release()

    def look(self) -> Outcome | None:
        """What the thread does once an interval: closes the window if enough was routed in it,
        judges the last move by it, and in auto mode moves if that pays. None: the window stays
        open, or a move is under way.

        Raises:
            CrossdockError: the engine has failed.
        """
        if not self._one.acquire(blocking=False):
            return None
        try:
            window = self._close_window()
            if window is None:
                return None
            self._judge(window)
            if self.config.rebalance != "auto":
                return Outcome("unchanged", 'rebalance = "manual"')
            return self._plan(window, None)
        finally:
            self._one.release()

    def _run(self) -> None:
        while not self._stop.wait(self.config.rebalance_interval_s):
            try:
                self.look()
            except CrossdockError as error:
                if not self._stop.is_set():
                    log.warning("rebalance: no look at the loads: %s", error)
            except Exception:  # serving goes on, and the next window may be a better one
                log.exception("rebalance: planning failed")

    def _close_window(self) -> Window | None:
        now = self.mover.reading()
        if self._base is None:
            self._base = now
            return None
        window = Window.between(self._base, now)
        if not enough(window):
            return None
        self._base, self._last = now, window
        return window

    def _window_to_plan(self) -> Window:
        """The open window if it says enough, else the one before it, else the open one."""
        now = self.mover.reading()
        window = None if self._base is None else Window.between(self._base, now)
        if window is None or not enough(window):
            window = self._last or window
        if window is None or not window.load_LE.any():
            since = "yet" if self.history.moved_at is None else "since the last move"
            raise ConfigError(f"no tokens were routed {since} to plan from; send requests first")
        return window

    def _judge(self, window: Window) -> None:
        balancedness = window.balancedness
        if self._unjudged is None or balancedness is None:
            return
        before, predicted = self._unjudged
        self._unjudged = None
        measured = balancedness / before - 1
        self.totals.measured_gain = measured
        self.history = judged(self.history, predicted, measured)
        log.info("rebalance: balancedness gained %.1f%%, %.1f%% expected",
                 100 * measured, 100 * predicted)  # fmt: skip

    def _plan(self, window: Window, policy: str | None) -> Outcome:
        decision = self._decide(
            Question(
                window,
                self.mover.placement,
                self.config,
                self.history,
                self.mover.expert_bytes,
                self._clock(),
                policy,
                self.mover.read_rows,
            )
        )
        plan, why = decision.plan, decision.why
        log.debug("rebalance: %s", why)
        if plan is None or not decision.move:
            self.totals.results["unchanged"] += 1
            return Outcome("unchanged", why, plan)
        return self._move(plan, window, why)

    def _move(self, plan: Proposal, window: Window, why: str) -> Outcome:
        before = self.mover.reading()
        log.info("rebalance: moving %d experts, %.1f MiB: %s", plan.moves,
                 plan.moved_bytes / 2**20, why)  # fmt: skip
        self.totals.predicted_gain = plan.gain
        try:
            ended = self.mover.rebalance(plan.slot_expert_LP)
            after = self.mover.reading()
        except Exception as error:
            self._failed(plan, str(error))
            raise
        self._base, self._last = after, None
        self.totals.moved_bytes += ended.moved_bytes
        self.totals.seconds.observe(ended.seconds)
        if ended.error is not None:
            return self._failed(plan, ended.error, ended)
        self.history = moved(
            self.history, plan, self._clock(), _lost_s(window, Window.between(before, after)), True
        )
        if window.balancedness is not None:
            self._unjudged = (window.balancedness, plan.gain)
        self.totals.results["moved"] += 1
        log.info("rebalance: done in %.2f s", ended.seconds)
        return Outcome("moved", why, plan, ended.moved_bytes, ended.seconds)

    def _failed(self, plan: Proposal, error: str, ended: Rebalanced | None = None) -> Outcome:
        layers = 0 if ended is None else ended.layers
        log.error("rebalance failed: %s; %s", error,
                  "the old placement goes on serving" if not layers else
                  f"{layers} layers had moved by then, the others go on as they were")  # fmt: skip
        self.totals.results["failed"] += 1
        self.history = moved(self.history, plan, self._clock(), 0.0, False)
        return Outcome(
            "failed",
            error,
            plan,
            ended.moved_bytes if ended else 0,
            ended.seconds if ended else 0.0,
        )


def _lost_s(usual: Window, during: Window) -> float:
    """How much longer steps took while experts moved than as many did before."""
    if not usual.steps:
        return 0.0
    return max(0.0, during.step_s - during.steps * usual.step_s / usual.steps)
