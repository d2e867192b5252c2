"""Whether to move experts now, and where: gain over a horizon against the measured cost of moving.

A step waits for its slowest rank in every layer. So of the part of a step that experts take, a
placement saves as much as it lowers the sum over layers of the slowest rank's time (`expert_time`).
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from crossdock.balance import POLICIES, Answer, Problem, diff, imbalance, settle, split
from crossdock.control.expert_time import rank_time
from crossdock.control.window import Window
from crossdock.core import ConfigError, EngineConfig, Placement

SERVED = ("sticky", "eplb")
"""Policies that want an expert's replicas to share evenly, as a hash makes them."""
BY_QUOTA = (*SERVED, "quota", "llep")
"""Where they share so that the ranks are even, by `replica_choice`."""
HORIZON = 10
"""Intervals for which a placement is expected to serve: what it gains in them is its gain."""
BYTES_PER_S = 1e9
"""What steps are taken to lose to a move until one was measured: a second for so many bytes."""
CHEAPEST = 0.1
"""Part of that below which a measured cost is not believed."""
GPU_EXPERT_SHARE = 0.3
"""Of a step, where none was timed."""
MIN_TOKENS = 16
"""Per expert on average: windows with fewer say too little about what is popular."""
MOST_BACKOFF = 16


@dataclass(frozen=True)
class History:
    """What moves so far have taught.

    moved_at: when the last one ended. floor: the imbalance it was to leave. cost_per_byte: seconds
    of steps lost per byte, None before the first. backoff: of the interval, doubled by a move that
    failed or gained less than half of what was predicted.
    """

    moved_at: float | None = None
    floor: float = 1.0
    cost_per_byte: float | None = None
    backoff: int = 1

    @property
    def seconds_per_byte(self) -> float:
        least = CHEAPEST / BYTES_PER_S
        return 1 / BYTES_PER_S if self.cost_per_byte is None else max(self.cost_per_byte, least)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A placement and what is expected of it.

    imbalance_before, imbalance_after: by layer, for the window's load. moves, moved_bytes: copies
    to make, over all layers. gain: of balancedness, after over before, less 1. left: of the time
    that steps take for experts. gain_s, cost_s: seconds of steps saved over the horizon, and lost
    to moving.
    """

    policy: str
    slot_expert_LP: np.ndarray
    imbalance_before: tuple[float, ...]
    imbalance_after: tuple[float, ...]
    moves: int
    moved_bytes: int
    gain: float
    left: float
    gain_s: float
    cost_s: float


@dataclass(frozen=True, eq=False)
class Question:
    """What a decision depends on. policy: asked for by somebody; None: decide by `config` whether
    to move at all. expert_bytes: of one expert in one layer. now: on the clock of the history.
    read_rows: as `rank_time` takes it."""

    window: Window
    placement: Placement
    config: EngineConfig
    history: History
    expert_bytes: int
    now: float
    policy: str | None = None
    read_rows: float = 0.0


@dataclass(frozen=True, eq=False)
class Decision:
    """`why`: what speaks for moving, or against. `plan`: where one was made."""

    move: bool
    why: str
    plan: Proposal | None = None


def enough(window: Window) -> bool:
    """Whether a window's load can be planned for."""
    return bool(window.load_LE.sum(axis=1).min() >= MIN_TOKENS * window.load_LE.shape[1])


def decide(question: Question) -> Decision:
    """Whether to move, and where.

    By itself (no `policy`) nothing is planned in the interval (times the backoff) after a move, nor
    while the imbalance is under the threshold, nor until it has risen by half of the threshold's
    distance from 1 over what the last move was to leave; and nothing is moved to that costs more
    than it gains.

    Raises:
        ConfigError: a policy that is not served, or cannot place this.
    """
    if question.policy is not None:
        plan = propose(question, question.policy, weigh=False)
        if not plan.moves or plan.gain <= 0:
            return Decision(False, f"{plan.policy} finds nothing better", plan)
        return Decision(True, f"asked for, by {plan.policy}", plan)
    config, history = question.config, question.history
    wait = config.rebalance_interval_s * history.backoff
    since = inf if history.moved_at is None else question.now - history.moved_at
    if since < wait:
        return Decision(False, f"the last move was {since:.0f} s ago, of {wait:g} s")
    level = float(_imbalance(question, question.placement.slot_expert_LP).mean())
    rise = history.floor + (config.rebalance_threshold - 1) / 2
    limit = max(config.rebalance_threshold, rise if history.moved_at is not None else 1.0)
    if level < limit:
        return Decision(False, f"the imbalance is {level:.3f}, under {limit:.3f}")
    plan = propose(question, config.rebalance_policy, weigh=True)
    if not plan.moves or plan.gain <= 0:
        return Decision(False, f"{plan.policy} finds nothing better than {level:.3f}", plan)
    sums = f"{plan.gain_s:.3g} s of steps gained over the horizon, {plan.cost_s:.3g} s lost"
    if plan.gain_s <= plan.cost_s:
        return Decision(False, f"not worth it: {sums}", plan)
    return Decision(True, sums, plan)


def propose(question: Question, policy: str, weigh: bool) -> Proposal:
    """`weigh`: tell the policy what moving an expert costs, else it is left to its own guess.

    Raises:
        ConfigError: a policy that is not served, or cannot place this.
    """
    config, placement, load_LE = question.config, question.placement, question.window.load_LE
    served = BY_QUOTA if config.replica_choice == "quota" else SERVED
    if policy not in served:
        raise ConfigError(
            f"policy {policy!r}: with replica_choice {config.replica_choice!r} expected one of "
            f"{', '.join(served)}"
        )
    ranks, now_LP = placement.num_ranks, placement.slot_expert_LP
    tokens_L = load_LE.sum(axis=1)
    before = _imbalance(question, now_LP)
    slowest, mean = _times(question, now_LP)
    worth_s = _horizon_s(question.window, config)
    cost_s = question.expert_bytes * question.history.seconds_per_byte
    # Even ranks would save so much, and the fullest ones so many tokens: what one of them is worth.
    saved_s = worth_s * (1 - mean / slowest) if slowest else 0.0
    tokens = float((before - 1) @ tokens_L) / ranks
    problem = Problem(
        load_LE,
        ranks,
        placement.slots_per_rank,
        current_LP=now_LP,
        expert_bytes=question.expert_bytes,
        move_cost=cost_s * tokens / saved_s if weigh and saved_s > 0 else None,
    )
    new_LP = settle(POLICIES[policy](problem), now_LP, ranks).slot_expert_LP
    after = _imbalance(question, new_LP)
    moves = len(diff(now_LP, new_LP, ranks))
    left = _times(question, new_LP)[0] / slowest
    return Proposal(
        policy,
        new_LP,
        tuple(before.tolist()),
        tuple(after.tolist()),
        moves,
        moves * question.expert_bytes,
        float(before @ tokens_L) / float(after @ tokens_L) - 1,
        left,
        worth_s * (1 - left),
        moves * cost_s,
    )


def moved(history: History, plan: Proposal, now: float, lost_s: float, ok: bool) -> History:
    """After a move that ended at `now` and kept steps `lost_s` longer than usual."""
    if not ok:
        return replace(history, moved_at=now, backoff=min(2 * history.backoff, MOST_BACKOFF))
    cost = lost_s / plan.moved_bytes if plan.moved_bytes else history.seconds_per_byte
    if history.cost_per_byte is not None:
        cost = (cost + history.cost_per_byte) / 2
    floor = float(np.mean(plan.imbalance_after))
    return replace(history, moved_at=now, floor=floor, cost_per_byte=cost)


def judged(history: History, predicted: float, measured: float) -> History:
    """After the first window that followed a move: gains of balancedness."""
    good = measured >= predicted / 2
    return replace(history, backoff=1 if good else min(2 * history.backoff, MOST_BACKOFF))


def expert_share(window: Window, config: EngineConfig) -> float:
    """The part of a step that experts take, as decisions take it to be."""
    guess = GPU_EXPERT_SHARE if config.device == "cuda" else 0.0
    return window.expert_share or guess


def _imbalance(question: Question, slot_expert_LP: np.ndarray) -> np.ndarray:
    """`imbalance_L` of the window's load."""
    answer, ranks = _answer(question, slot_expert_LP), question.placement.num_ranks
    return imbalance(question.window.load_LE, answer, ranks)


def _times(question: Question, slot_expert_LP: np.ndarray) -> tuple[float, float]:
    """Of the slowest rank of each layer, and of the mean one, over the window's steps."""
    answer, ranks = _answer(question, slot_expert_LP), question.placement.num_ranks
    time_KLR = rank_time(question.window, answer, ranks, question.read_rows)
    return float(time_KLR.max(axis=2).sum()), float(time_KLR.mean(axis=2).sum())


def _answer(question: Question, slot_expert_LP: np.ndarray) -> Answer:
    """Replicas share as they are chosen."""
    if question.config.replica_choice == "quota":
        return split(slot_expert_LP, question.window.load_LE, question.placement.num_ranks)
    return Answer(slot_expert_LP)


def _horizon_s(window: Window, config: EngineConfig) -> float:
    """Seconds that the fullest ranks' experts take over the horizon, going on as in the window."""
    busy = min(1.0, window.step_s / window.seconds) if window.seconds > 0 else 0.0
    return HORIZON * config.rebalance_interval_s * busy * expert_share(window, config)
