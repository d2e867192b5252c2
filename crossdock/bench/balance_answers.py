"""`bench balance --text`: what the methods that change answers do to balance, and to the
likelihood of a text, beside the model as it is.

One CPU rank reads the text in windows, several a step. The first half of the steps is for the bias
to settle; figures are of the second half, the same tokens for every method.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crossdock.balance import imbalance_of
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.core import ConfigError, EngineConfig, Plan, Request, SamplingParams, Scheduled

if TYPE_CHECKING:
    from crossdock.engine import Engine

CAPACITIES = (2.0, 1.5, 1.25, 1.0)
BIAS_STEPS = (0.001, 0.003, 0.01)
WINDOW, WINDOWS_A_STEP = 256, 4
ADJUST_TOKENS = 2048
"""Between two adjustments of the bias; so few that some tens of them fit in a text."""


@dataclass(frozen=True)
class AnswersOptions:
    """`tokens` of `text` are read. `ranks`: over which the experts' load is looked at, in order."""

    model: str
    text: Path
    ranks: int = 8
    tokens: int = 65536
    capacities: tuple[float, ...] = CAPACITIES
    bias_steps: tuple[float, ...] = BIAS_STEPS


@dataclass(frozen=True)
class Read:
    """Of each step of the second half: imbalance, mean over layers; mean log-likelihood of its
    tokens, nats. dropped: share of all choices of experts, there."""

    imbalance: list[float]
    likelihood: list[float]
    dropped: float


def run_answers(options: AnswersOptions, on_progress: Callable[[str], None]) -> list[Case]:
    """
    Raises:
        UserError: the model or the text.
    """
    base = _config(options)
    ids = _text_ids(base, options)
    methods: list[tuple[str, float, EngineConfig]] = [("off", 0.0, base)]
    methods += [("capacity", c, replace(base, expert_capacity=c)) for c in options.capacities]
    methods += [("bias", b, replace(base, router_bias_step=b)) for b in options.bias_steps]
    cases: list[Case] = []
    off: Read | None = None
    for name, value, config in methods:
        on_progress(f"reading the text: {name}" + (f" {value:g}" if value else ""))
        read = _read(config, ids, options.ranks)
        off = off or read
        cases += _cases(name, value, read, off, options.ranks)
    return cases


def report(options: AnswersOptions, cases: Sequence[Case], command: str) -> Report:
    notes = {
        "options": {**vars(options), "text": options.text.name},
        "meaning": {
            "answers_imbalance": "load of the fullest rank over the mean in a step of "
            f"{WINDOW * WINDOWS_A_STEP} tokens, experts in order on the ranks; means over steps "
            "and layers; what was dropped is no load",
            "answers_log_likelihood": f"of the text's tokens, windows of {WINDOW}, nats a token; "
            "`change`: less that of off",
            "capacity": "factor over the mean load of an expert in a step",
            "bias": f"step of the router's bias, every {ADJUST_TOKENS} tokens; figures are of the "
            "second half of the text, for all methods",
        },
    }
    return Report(command, cpu_name(), tuple(cases), notes)


def _config(options: AnswersOptions) -> EngineConfig:
    from crossdock.models.hub import resolve_model

    return EngineConfig(
        str(resolve_model(options.model, None)),
        device="cpu",
        transport="local",
        dtype="float32",
        overlap="off",
        max_num_batched_tokens=WINDOW * WINDOWS_A_STEP,
        kv_memory_gib=0.1,
        prefix_caching=False,
        load_window_tokens=ADJUST_TOKENS,
    )


def _text_ids(config: EngineConfig, options: AnswersOptions) -> list[int]:
    from crossdock.models.tokenizer import load_tokenizer

    try:
        data = options.text.read_bytes()
        text = (gzip.decompress(data) if options.text.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.text}: no text that can be read: {error}") from None
    ids = load_tokenizer(Path(config.model)).encode(text)[: options.tokens]
    least = 4 * WINDOW * WINDOWS_A_STEP
    if len(ids) < least:
        raise ConfigError(f"{options.text}: {len(ids)} tokens, expected {least} or more")
    return ids


def _read(config: EngineConfig, ids: list[int], ranks: int) -> Read:
    from crossdock.comm import build_world
    from crossdock.engine import build_engine

    world = build_world(0, 1, "cpu", "local", {}, "", config.deadline_s)
    engine = build_engine(config, world, lambda done, total: None)
    size = WINDOW * WINDOWS_A_STEP
    steps = len(ids) // size
    imbalance, likelihood = [], []
    rows_LE, start = _counts(engine, "slot_tokens"), (0, 0)
    if rows_LE.shape[1] % ranks:
        raise ConfigError(f"{ranks} ranks do not divide {rows_LE.shape[1]} experts")
    for step in range(steps):
        if step == steps // 2:
            start = _dropped(engine)
        score = _step(engine, ids[step * size : (step + 1) * size])
        now_LE = _counts(engine, "slot_tokens")
        load_LR = (now_LE - rows_LE).reshape(len(now_LE), ranks, -1).sum(axis=2)
        rows_LE = now_LE
        if step >= steps // 2:
            imbalance.append(float(imbalance_of(load_LR).mean()))
            likelihood.append(score)
    dropped, chosen = _dropped(engine)
    engine.close()
    return Read(imbalance, likelihood, (dropped - start[0]) / (chosen - start[1]))


def _step(engine: "Engine", ids: list[int]) -> float:
    """Mean log-likelihood of the tokens of each window but its first."""
    import torch

    from crossdock.engine.batch import make_batch
    from crossdock.engine.drive import drive

    if engine.adjuster is not None:
        engine.adjuster.advance(len(ids))
    runner = engine.runner
    pages = -(-WINDOW // runner.kv.page_size)
    windows = [tuple(ids[at : at + WINDOW]) for at in range(0, len(ids), WINDOW)]
    items = tuple(
        Scheduled(
            Request(str(i), window, SamplingParams(), key=i),
            0,
            window,
            tuple(range(i * pages, (i + 1) * pages)),
            sample=True,
        )
        for i, window in enumerate(windows)
    )
    with torch.inference_mode():
        batch = make_batch(Plan(items), runner.kv.page_size, runner.device)
        hidden_TH = drive(runner.model.forward(batch, runner.kv))
        logp_TV = runner.model.logits(hidden_TH).log_softmax(dim=-1)
        logp_BWV = logp_TV.view(len(windows), WINDOW, -1)[:, :-1]
        next_BW1 = torch.tensor(windows)[:, 1:, None]
        return float(logp_BWV.gather(2, next_BW1).double().mean())


def _counts(engine: "Engine", name: str) -> np.ndarray:
    return np.array(engine.recorder.snapshot()[name])


def _dropped(engine: "Engine") -> tuple[int, int]:
    """So far: choices dropped, and all."""
    return int(_counts(engine, "dropped_tokens").sum()), int(_counts(engine, "expert_tokens").sum())


def _cases(name: str, value: float, read: Read, off: Read, ranks: int) -> list[Case]:
    shape: dict[str, Any] = {"method": name, "value": value, "ranks": ranks}
    mean, mean_off = float(np.mean(read.likelihood)), float(np.mean(off.likelihood))
    even, even_off = float(np.mean(read.imbalance)), float(np.mean(off.imbalance))
    more: dict[str, Any] = {"figure": "mean", "dropped": read.dropped}
    against = {} if name == "off" else {"off": even_off}
    first = case_of("answers_imbalance", read.imbalance, "max/mean", "lower", shape)
    second = case_of("answers_log_likelihood", read.likelihood, "nats/token", "higher", shape)
    return [
        replace(first, median=even, against=against, more={**more, "before": even_off}),
        replace(
            second,
            median=mean,
            against={} if name == "off" else {"off": mean_off},
            more={**more, "change": mean - mean_off},
        ),
    ]
