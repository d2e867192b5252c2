"""`bench steps`: single steps of an engine's ranks on made-up batches, without requests: what a
step costs one way and another, and what its layers reach."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from crossdock.bench.ranks import Ranks
from crossdock.bench.steps_batch import Batch
from crossdock.core import ConfigError, EngineConfig, ModelSpec
from crossdock.engine import read_spec
from crossdock.engine.overlap import refusals
from crossdock.launch.start import find_model, resolve

MEASURES = ("overlap", "mixed", "layers", "ranks", "memory")
MODES = ("off", "sbo", "tbo")
DECODES = (8, 32, 64, 128, 256)
PROMPTS = (512, 2048, 8192)
MIXED_DECODES = 128
MIXED_PROMPTS = (1024, 4096, 8064)
CONTEXT, LONG_CONTEXT = 1024, 4096
PROMPT_LEN = 2048

OnProgress = Callable[[str], None]
Answers = list[dict[str, Any]]
"""By rank."""


@dataclass(frozen=True)
class StepsOptions:
    """`measure`: some of MEASURES. `settings`: further fields of EngineConfig. `turns` of `reps`
    steps in a row."""

    model: str
    ranks: int
    device: str
    measure: tuple[str, ...] = ("overlap", "mixed")
    turns: int = 7
    reps: int = 5
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepsRun:
    """`answers[group][name]`: of each rank, as `steps_rank` gives it; groups as `_requests` has
    them, "copy", and "alone ..." of one rank, what "ranks ..." is of all. `facts`: of each rank."""

    options: StepsOptions
    spec: ModelSpec
    device: str
    facts: list[dict[str, Any]]
    answers: dict[str, dict[str, Answers]]
    refused: dict[str, str]


def run_steps(options: StepsOptions, on_progress: OnProgress = lambda what: None) -> StepsRun:
    """
    Raises:
        ConfigError: a measure that there is not, or that this number of ranks has nothing for.
        UserError, CrossdockError: an engine does not start.
    """
    for what in options.measure:
        if what not in MEASURES:
            raise ConfigError(f"--measure {what!r}: expected some of {', '.join(MEASURES)}")
    if "ranks" in options.measure and options.ranks == 1:
        raise ConfigError("--measure ranks compares one rank with more; give --ranks 2 or more")
    if "memory" in options.measure and options.device != "cuda":
        raise ConfigError("--measure memory is of GPUs; of CPU ranks bench engine tells it")
    config, spec = _config(options, options.ranks)
    refused = {str(mode): why for mode, why in refusals(config, spec).items()}
    answers: dict[str, dict[str, Answers]] = {}
    with ExitStack() as stack:
        on_progress(f"starting {options.ranks} ranks")
        ranks = _start(config, spec, stack)
        facts = ranks.facts
        if {"layers", "ranks"} & set(options.measure):
            answers["copy"] = {"": ranks.ask({"what": "copy"})}
        for what in options.measure:
            on_progress(what)
            modes = tuple(mode for mode in MODES if mode not in refused)
            for group, name, request in _requests(what, options, config, spec, modes):
                answers.setdefault(group, {})[name] = ranks.ask(request)
    if "ranks" in options.measure:
        on_progress("starting one rank")
        config, spec = _config(options, 1)
        with ExitStack() as stack:
            ranks = _start(config, spec, stack)
            on_progress("ranks")
            for group, name, request in _requests("ranks", options, config, spec, ("off",)):
                answers[f"alone {group}"] = {name: ranks.ask(request)}
    return StepsRun(options, spec, str(facts[0]["name"]), facts, answers, refused)


def _config(options: StepsOptions, ranks: int) -> tuple[EngineConfig, ModelSpec]:
    given: dict[str, Any] = {"device": options.device, **options.settings}
    if options.device == "cpu" and ranks > 1:
        given.setdefault("transport", "collective")  # needs no memory that a launcher would make
    config = EngineConfig(options.model, ranks=ranks, **given)
    config = replace(config, model=str(find_model(config)))
    spec = read_spec(config)
    return resolve(config, spec), spec


def _start(config: EngineConfig, spec: ModelSpec, stack: ExitStack) -> Ranks:
    settings = {"config": asdict(config), "vocab_size": spec.vocab_size}
    return Ranks("crossdock.bench.steps_rank", config.ranks, config.device, settings, stack)


def _requests(
    what: str,
    options: StepsOptions,
    config: EngineConfig,
    spec: ModelSpec,
    modes: Sequence[str],
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """`(group, name, request)`: the request is the same for all ranks, and the name says its batch.
    Groups are the measures, and of some "parts" beside the times."""
    assert config.max_model_len is not None
    most, context = config.max_num_batched_tokens, min(CONTEXT, config.max_model_len)
    length = min(PROMPT_LEN, config.max_model_len - 1)
    seqs = min(config.max_num_seqs, most)
    turns = {"turns": options.turns, "reps": options.reps}
    if what == "overlap":
        for batch in _sizes(seqs, most, context, length):
            works = {mode: _work(mode, batch) for mode in (*modes, "auto")}
            yield what, describe(batch), {"what": "time", "works": works, **turns}
    elif what == "mixed":
        decodes = min(MIXED_DECODES, seqs)
        for tokens in _upto(MIXED_PROMPTS, most - decodes):
            both = Batch(decodes, context, tokens, length)
            apart = _work("off", both.without_prompts(), both.without_decodes())
            works = {"one": _work("off", both), "two": apart}
            yield what, describe(both), {"what": "time", "works": works, **turns}
    elif what == "layers":
        long = min(LONG_CONTEXT, config.max_model_len)
        for batch in (Batch(prompt_tokens=most, prompt_len=length), Batch(min(128, seqs), long)):
            yield what, describe(batch), _timed(options, batch, "off", "auto")
            yield f"{what} parts", describe(batch), _parts(options, batch, spec)
    elif what == "ranks":
        batch = Batch(min(128, seqs), context)
        yield what, describe(batch), _timed(options, batch, "off")
        yield f"{what} parts", describe(batch), _parts(options, batch, spec)
    else:
        tbo = [mode for mode in ("off", "tbo") if mode in modes]
        for tokens in _upto(PROMPTS, most):
            batch = Batch(prompt_tokens=tokens, prompt_len=length)
            yield what, str(tokens), {"what": "memory", "batch": asdict(batch), "modes": tbo}


def _sizes(seqs: int, most: int, context: int, length: int) -> list[Batch]:
    decodes = [Batch(n, context) for n in _upto(DECODES, seqs)]
    return decodes + [Batch(prompt_tokens=n, prompt_len=length) for n in _upto(PROMPTS, most)]


def _upto(sizes: Sequence[int], most: int) -> list[int]:
    """Those that fit, or the most that does."""
    return [size for size in sizes if size <= most] or [most]


def _work(mode: str, *batches: Batch) -> dict[str, Any]:
    return {"mode": mode, "batches": [asdict(batch) for batch in batches]}


def _timed(options: StepsOptions, batch: Batch, *modes: str) -> dict[str, Any]:
    works = {mode: _work(mode, batch) for mode in modes}
    return {"what": "time", "works": works, "turns": options.turns, "reps": options.reps}


def _parts(options: StepsOptions, batch: Batch, spec: ModelSpec) -> dict[str, Any]:
    return {
        "what": "parts",
        "batch": asdict(batch),
        "mode": "off",
        "turns": options.turns,
        "layers": spec.num_layers,
        "moe_layers": list(spec.moe_layers),
    }


def describe(batch: Batch) -> str:
    parts = []
    if batch.decodes:
        parts.append(f"{batch.decodes} decodes at {batch.context:,}")
    if batch.prompt_tokens:
        parts.append(f"{batch.prompt_tokens:,} tokens of prompts")
    return " + ".join(parts)
