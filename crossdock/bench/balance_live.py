"""`bench balance --live`: an engine with a skewed load, before, while and after it is balanced.

Every round begins with the popular experts together on the first ranks. A load runs on that ("off":
nobody moves anything), runs again while the automatic mode looks at the loads and moves ("moving"),
and a third time on what that left ("auto").
"""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.stats import percentile
from crossdock.bench.workload import random_prompts
from crossdock.core import CrossdockError, SamplingParams

if TYPE_CHECKING:
    from crossdock.launch import LLM
    from crossdock.launch.rebalance import Outcome

MOST_RISE = 1.1
"""p99 of inter-token latency while experts move, over what it was."""
MOST_OFF = 5.0
"""Points between the throughput gained and what the predicted balancedness says."""
RECORDED = 1 / 4
"""Of an answer's tokens: enough to see which experts are popular."""
MOVE_AT = 1 / 3
"""Of a load's tokens, when the balancer looks."""


@dataclass(frozen=True)
class LiveOptions:
    """`requests` run at once, each with `input_len` random tokens and `output_len` new ones.
    `settings`: further fields of EngineConfig."""

    model: str
    ranks: int = 2
    requests: int = 16
    input_len: int = 32
    output_len: int = 96
    rounds: int = 5
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """One run of the load. `gaps`: (end, seconds) of each inter-token gap, from when the balancer
    looks on, or would. `again`: requests that were asked a second time, or more."""

    tokens: int
    seconds: float
    gaps: tuple[tuple[float, float], ...]
    failed: int
    again: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Round:
    """`began`, `ended`: of the balancer's look, on the clock of the gaps; the move is the last part
    of it. `share`: what experts took of a step. `measured_gain`: of balancedness."""

    off: Load
    moving: Load
    auto: Load
    began: float
    ended: float
    outcome: "Outcome"
    share: float
    measured_gain: float

    @property
    def moved_from(self) -> float:
        return self.ended - self.outcome.seconds

    def gaps_within(self, start: float, end: float) -> list[float]:
        """Seconds, of gaps that have a part in that time."""
        return [gap for at, gap in self.moving.gaps if start <= at and at - gap <= end]


@dataclass(frozen=True)
class LiveRun:
    options: LiveOptions
    device: str
    rounds: tuple[Round, ...]


def run_live(options: LiveOptions, on_progress: Callable[[str], None]) -> LiveRun:
    """
    Raises:
        CrossdockError: nothing was moved, so there is nothing to report.
    """
    from crossdock.launch import LLM  # needs torch, which the planners do not

    settings = {
        "prefix_caching": False,
        "max_num_seqs": options.requests,
        **options.settings,
        "rebalance": "auto",
        "rebalance_interval_s": 1e6,  # looked at when the benchmark says
    }
    with LLM(options.model, options.ranks, **settings) as llm:
        gc.collect()
        gc.freeze()  # as the server does
        on_progress("recording the routing")
        prompts = _prompts(options, llm.client.spec.vocab_size)
        llm.client.recording.start()
        _run(llm, prompts, max(1, round(RECORDED * options.output_len)))
        window = llm.client.recording.dump()["windows"][0]
        bad_LP = crowded(np.array(window["tokens"]), llm.client.placement.slot_expert_LP.shape[1])
        rounds = []
        for number in range(options.rounds):
            on_progress(f"round {number + 1} of {options.rounds}")
            rounds.append(_round(llm, prompts, options.output_len, bad_LP))
        return LiveRun(options, _device(llm), tuple(rounds))


def crowded(load_LE: np.ndarray, slots: int) -> np.ndarray:
    """`slot_expert_LP`: experts by load, the popular ones on the first ranks; the rest empty."""
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    spare = np.full((len(load_LE), slots - load_LE.shape[1]), -1, dtype=order_LE.dtype)
    return np.concatenate([order_LE, spare], axis=1)


def _round(
    llm: "LLM", prompts: Sequence[Sequence[int]], output_len: int, bad_LP: np.ndarray
) -> Round:
    from crossdock.control import History, Window, expert_share

    client = llm.client
    client.rebalance(bad_LP)
    balancer = client.balancer
    balancer.history = History()
    first = client.reading()
    balancer.begin_window()
    off = _run(llm, prompts, output_len)
    window = Window.between(first, client.reading())
    share = expert_share(window, client.config)
    began, ended, outcomes = 0.0, 0.0, list["Outcome | None"]()

    def look() -> None:
        nonlocal began, ended
        began = time.perf_counter()
        outcomes.append(balancer.look())
        ended = time.perf_counter()

    moving = _run(llm, prompts, output_len, look)
    if not outcomes:
        raise CrossdockError(f"the balancer failed: {client.failure or 'its error is above'}")
    outcome = outcomes[0]
    if outcome is None or outcome.plan is None or outcome.result != "moved":
        why = "too few tokens" if outcome is None else outcome.why
        raise CrossdockError(f"nothing was moved: {why}; use more --requests or --output-len")
    balancer.begin_window()
    before = client.reading()
    auto = _run(llm, prompts, output_len)
    now = Window.between(before, client.reading()).balancedness or 0.0
    was = 1 / float(np.mean(outcome.plan.imbalance_before))
    return Round(off, moving, auto, began, ended, outcome, share, now / was - 1)


def _run(
    llm: "LLM",
    prompts: Sequence[Sequence[int]],
    output_len: int,
    at_part: Callable[[], None] | None = None,
) -> Load:
    """All prompts at once; `at_part` runs in a thread once a part of the tokens came, and until it
    has ended, prompts that were answered are asked again."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    done = threading.Condition()
    arrivals: list[list[tuple[float, int]]] = []
    reasons: list[str] = []
    due = MOVE_AT * len(prompts) * output_len
    came, since = 0, inf
    thread = threading.Thread(target=at_part) if at_part is not None else None

    def ask(prompt: Sequence[int]) -> None:
        row = list[tuple[float, int]]()
        arrivals.append(row)
        name = f"live-{start}-{len(arrivals)}"
        llm.client.submit(name, prompt, params, partial(listen, prompt, row))

    def listen(prompt: Sequence[int], row: list[tuple[float, int]], update: Any) -> None:
        nonlocal came, since
        with done:
            if update.token_ids:
                row.append((time.perf_counter(), len(update.token_ids)))
                came += len(update.token_ids)
            if since == inf and came >= due:
                since = time.perf_counter()
                if thread is not None:
                    thread.start()
            if update.finish_reason is None:
                return
            reasons.append(update.finish_reason)
            if thread is not None and thread.is_alive() and update.finish_reason == "length":
                ask(prompt)
            if len(reasons) == len(arrivals):
                done.notify_all()

    start = time.perf_counter()
    with done:
        for prompt in prompts:
            ask(prompt)
        done.wait_for(lambda: len(reasons) == len(arrivals))
    seconds = time.perf_counter() - start
    if thread is not None and since < inf:
        thread.join()
    gaps = [
        (later, (later - earlier) / count)
        for row in arrivals
        for (earlier, _), (later, count) in pairwise(row)
        if earlier >= since
        for _ in range(count)
    ]
    failed = sum(reason != "length" for reason in reasons)
    return Load(came, seconds, tuple(gaps), failed, len(arrivals) - len(prompts))


def _prompts(options: LiveOptions, vocab: int) -> list[list[int]]:
    length = (options.input_len, options.input_len)
    made = random_prompts(options.requests, length, (1, 1), range(vocab), "live")
    return [list(prompt.token_ids) for prompt in made]


def _device(llm: "LLM") -> str:
    device = str(llm.client.info[0]["device"])
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return f"{llm.client.config.ranks} x {torch.cuda.get_device_name(torch.device(device))}"


def report(run: LiveRun, command: str) -> Report:
    options = run.options
    shape = {
        "model": options.model.rstrip("/").rsplit("/", 1)[-1],
        "ranks": options.ranks,
        "requests": options.requests,
        "lengths": f"{options.input_len}:{options.output_len}",
    }
    asked = "H200" in run.device
    cases = [
        *_latencies(run, shape, asked),
        *_throughput(run, shape, asked),
        *_moves(run, shape),
    ]
    notes = {
        "settings": options.settings,
        "meaning": {
            "live_itl": "of the last two thirds of a load's tokens",
            "live_gain_off_prediction": "throughput gained against what the plan says of the "
            "experts' time (live_expert_share; on GPUs of the steps that were timed)",
            "off": "the popular experts together on the first ranks, nobody moves them",
            "moving": "gaps that fall into the move, and the load in which it was; planning: into "
            "the planning before it, in a process of its own",
            "auto": "the placement that the automatic mode moved to",
            "live_asked_again": "while experts moved: gaps beside their prompts are among the "
            "move's",
            "live_time_left": "of the experts' time, as planned",
        },
    }
    return Report(command, run.device, tuple(cases), notes)


def _latencies(run: LiveRun, shape: dict[str, Any], asked: bool) -> list[Case]:
    """Gaps of all rounds together; the rise by round."""
    gaps = {
        "off": [[s for _, s in r.off.gaps] for r in run.rounds],
        "planning": [r.gaps_within(r.began, r.moved_from) for r in run.rounds],
        "moving": [r.gaps_within(r.moved_from, r.ended) for r in run.rounds],
        "auto": [[s for _, s in r.auto.gaps] for r in run.rounds],
    }
    cases = []
    for phase, rounds in gaps.items():
        pooled = [1e3 * gap for round_ in rounds for gap in round_]
        for q in (50, 99):
            value = percentile(pooled, q)
            at = {**shape, "phase": phase, "percentile": q}
            more = {"gaps": len(pooled)}
            by_round = [percentile([1e3 * g for g in r], q) for r in rounds]
            case = case_of("live_itl", by_round, "ms", "lower", at, more={**more, "pooled": value})
            cases.append(case)
    rises = [
        percentile(moving, 99) / percentile(off, 99)
        for moving, off in zip(gaps["moving"], gaps["off"], strict=True)
    ]
    target = MOST_RISE if asked else None
    cases.append(case_of("live_itl_p99_rise", rises, "x", "lower", shape, target=target))
    return cases


def _throughput(run: LiveRun, shape: dict[str, Any], asked: bool) -> list[Case]:
    cases = [
        case_of(
            "live_throughput",
            [getattr(r, phase).rate for r in run.rounds],
            "tokens/s",
            "higher",
            {**shape, "phase": phase},
        )
        for phase in ("off", "moving", "auto")
    ]
    gained = [100 * (r.auto.rate / r.off.rate - 1) for r in run.rounds]
    said = [100 * _predicted(r) for r in run.rounds]
    more = {"predicted": float(np.median(said))}
    cases.append(case_of("live_throughput_gain", gained, "%", "higher", shape, more=more))
    off = [abs(a - b) for a, b in zip(gained, said, strict=True)]
    target = MOST_OFF if asked else None
    cases.append(case_of("live_gain_off_prediction", off, "points", "lower", shape, target=target))
    return cases


def _predicted(round_: Round) -> float:
    """Of throughput: experts take `share` of a step, and of that the plan leaves a part."""
    assert round_.outcome.plan is not None
    return 1 / (1 - round_.share * (1 - round_.outcome.plan.left)) - 1


def _moves(run: LiveRun, shape: dict[str, Any]) -> list[Case]:
    plans = [r.outcome.plan for r in run.rounds if r.outcome.plan is not None]
    figures: Sequence[tuple[str, list[float], str, Any]] = (
        ("live_imbalance_before", [float(np.mean(p.imbalance_before)) for p in plans], "max/mean",
         "lower"),
        ("live_balancedness_gain_predicted", [100 * p.gain for p in plans], "%", "higher"),
        ("live_balancedness_gain", [100 * r.measured_gain for r in run.rounds], "%", "higher"),
        ("live_expert_share", [100 * r.share for r in run.rounds], "%", "lower"),
        ("live_move_seconds", [r.outcome.seconds for r in run.rounds], "s", "lower"),
        ("live_moved", [r.outcome.moved_bytes / 2**20 for r in run.rounds], "MiB", "lower"),
        ("live_asked_again", [float(r.moving.again) for r in run.rounds], "requests", "lower"),
        ("live_time_left", [100 * p.left for p in plans], "%", "lower"),
    )  # fmt: skip
    cases = [case_of(name, v, unit, better, shape) for name, v, unit, better in figures]
    failed = [float(r.off.failed + r.moving.failed + r.auto.failed) for r in run.rounds]
    cases.append(case_of("live_failed_requests", failed, "requests", "lower", shape, target=0.0))
    return cases
