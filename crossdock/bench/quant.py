"""`bench quant`: what FP8 does to a model's answers, beside the same model in BF16: the
log-likelihood of a text, and greedy continuations of its beginnings."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from crossdock.bench.ranks import Ranks
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.core import ConfigError, EngineConfig
from crossdock.engine import read_spec
from crossdock.launch.start import find_model, find_tokenizer, interpreted_bytes, resolve

VARIANTS = {"bf16": "none", "fp8": "fp8"}
"""And their `quantize`."""


@dataclass(frozen=True)
class QuantOptions:
    """`windows` of `context` tokens of the text are scored, all tokens but each one's first; the
    first `prompt_len` tokens of the first `prompts` windows are continued. `settings`: further
    fields of `EngineConfig`."""

    model: str
    text: Path
    ranks: int = 1
    device: str = "cpu"
    context: int = 512
    windows: int = 64
    prompts: int = 16
    prompt_len: int = 32
    output_len: int = 64
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """By window or prompt. `weight_bytes`: of the ranks together."""

    weight_bytes: int
    logprobs: list[list[float]]
    likeliest: list[list[int]]
    greedy: list[list[int]]

    @property
    def means(self) -> list[float]:
        return [fmean(window) for window in self.logprobs]


@dataclass(frozen=True)
class QuantRun:
    options: QuantOptions
    device: str
    windows: list[list[int]]
    answers: dict[str, Answers]


def run_quant(
    options: QuantOptions, on_progress: Callable[[str], None] = lambda what: None
) -> QuantRun:
    """
    Raises:
        ConfigError: the text is too short or cannot be read, or FP8 cannot run.
    """
    device: Any = options.device
    config = EngineConfig(options.model, ranks=options.ranks, device=device, **options.settings)
    config = replace(config, model=str(find_model(config)))
    windows = _windows(options, config)
    configs = {name: _variant(options, config, name, len(windows)) for name in VARIANTS}
    answers, named = {}, ""
    for name, variant in configs.items():
        on_progress(f"{name}: loading")
        with ExitStack() as stack:
            spec = read_spec(variant)
            symmetric = 0
            if variant.device == "cpu" and variant.transport == "nvlink":
                symmetric = interpreted_bytes(variant, spec)
            ranks = Ranks(
                "crossdock.bench.quant_rank", options.ranks, variant.device,
                {"config": asdict(variant)}, stack, symmetric,
            )  # fmt: skip
            on_progress(f"{name}: {len(windows)} windows of {options.context} tokens")
            found = ranks.ask(_request(options, windows))
            named = ranks.facts[0]["name"]
            weight_bytes = sum(facts["weight_bytes"] for facts in ranks.facts)
            answers[name] = _gathered(found, weight_bytes)
    named = f"{options.ranks} x {named}" if named else f"{cpu_name()}, Triton's interpreter"
    return QuantRun(options, named, windows, answers)


def _windows(options: QuantOptions, config: EngineConfig) -> list[list[int]]:
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {options.text}: cannot be read: {error}") from None
    tokens = list(find_tokenizer(config).encode(text))
    count = min(options.windows, len(tokens) // options.context)
    if not count:
        raise ConfigError(
            f"--text {options.text}: {len(tokens)} tokens, --context asks for {options.context}"
        )
    if options.prompt_len > options.context:
        raise ConfigError(f"--prompt-len {options.prompt_len}: --context is {options.context}")
    return [tokens[i * options.context : (i + 1) * options.context] for i in range(count)]


def _variant(options: QuantOptions, config: EngineConfig, name: str, windows: int) -> EngineConfig:
    sequences = -(-min(options.prompts, windows) // options.ranks)
    longest = max(options.context, options.prompt_len + options.output_len)
    transport: Any = config.transport
    if config.device == "cpu":  # in the interpreter
        other = "local" if options.ranks == 1 else "collective"
        transport = "nvlink" if name == "fp8" else other
    quantize: Any = VARIANTS[name]
    config = replace(
        config,
        quantize=quantize,
        transport=transport,
        dtype="bfloat16",
        overlap="off",
        max_model_len=longest,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(options.context, sequences),
    )
    # On CPUs all is said, and only the ranks run in the interpreter.
    return config if config.device == "cpu" else resolve(config, read_spec(config))


def _request(options: QuantOptions, windows: list[list[int]]) -> dict[str, Any]:
    prompts = [window[: options.prompt_len] for window in windows[: options.prompts]]
    return {
        "windows": windows,
        "rounds": -(-len(windows) // options.ranks),
        "prompts": prompts,
        "turns": -(-len(prompts) // options.ranks),
        "output_len": options.output_len,
    }


def _gathered(found: list[dict[str, Any]], weight_bytes: int) -> Answers:
    """Rank r answered every R-th from the r-th on."""
    whole = {key: _interleaved([answer[key] for answer in found]) for key in found[0]}
    return Answers(weight_bytes, **whole)


def _interleaved(parts: list[list[Any]]) -> list[Any]:
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def report(run: QuantRun, command: str) -> Report:
    notes = {
        "text": run.options.text.name,
        "settings": run.options.settings,
        "meaning": {
            "log_likelihood": "nats per token, a value a window; its mean beside it",
            "log_likelihood_difference": "FP8 less BF16",
            "same_likeliest": "share of the text's positions at which both name the same token",
            "same_greedy": "share of a prompt's new tokens, position by position: nothing after "
            "the first difference need agree",
        },
    }
    return Report(command, run.device, tuple(_cases(run)), notes)


def _cases(run: QuantRun) -> Iterator[Case]:
    bf16, fp8 = run.answers["bf16"], run.answers["fp8"]
    scored = sum(map(len, bf16.logprobs))
    text = {"windows": len(run.windows), "context": run.options.context}
    for name, answers in run.answers.items():
        more = {"mean": fmean(x for window in answers.logprobs for x in window), "tokens": scored}
        shape = {"variant": name, **_shape(run), **text}
        yield case_of("log_likelihood", answers.means, "nats", "higher", shape, more=more)
    both = {"variant": "fp8 / bf16", **_shape(run)}
    differences = [b - a for a, b in zip(bf16.means, fp8.means, strict=True)]
    more = {"mean": fmean(differences)}
    yield case_of(
        "log_likelihood_difference", differences, "nats", "higher", {**both, **text}, more=more
    )
    likeliest = _shares(bf16.likeliest, fp8.likeliest)
    more = {"mean": fmean(likeliest)}
    yield case_of("same_likeliest", likeliest, "%", "higher", {**both, **text}, more=more)
    pairs = list(zip(bf16.greedy, fp8.greedy, strict=True))
    firsts = [_first_difference(*pair) for pair in pairs]
    new = {"prompts": len(pairs), "output_len": run.options.output_len}
    same = _shares(bf16.greedy, fp8.greedy)
    found = {"identical": firsts.count(None), "first_difference": firsts}
    yield case_of("same_greedy", same, "%", "higher", {**both, **new}, more=found)
    for name, answers in run.answers.items():
        held = [answers.weight_bytes / 2**20]
        yield case_of("weights", held, "MiB", "lower", {"variant": name, **_shape(run)})


def _shape(run: QuantRun) -> dict[str, Any]:
    return {"model": Path(run.options.model).name, "ranks": run.options.ranks}


def _shares(ones: list[list[int]], others: list[list[int]]) -> list[float]:
    return [
        100 * fmean(a == b for a, b in zip(one, other, strict=True))
        for one, other in zip(ones, others, strict=True)
    ]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    unlike = (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(unlike, None)
