"""`bench quant`: what FP8 does to a model's answers, that of its products and that of its KV cache,
beside the same model in BF16: the log-likelihood of a text, and greedy continuations of its
beginnings."""

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

VARIANTS = {
    "bf16": {"quantize": "none", "kv_cache_dtype": "auto"},
    "fp8": {"quantize": "fp8", "kv_cache_dtype": "auto"},
    "fp8 kv": {"quantize": "none", "kv_cache_dtype": "fp8"},
}
"""And their settings; the first is what the others are compared with."""


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
    """By window or prompt. `weight_bytes`: of the ranks together; `kv_token_bytes`: of a cached
    token."""

    weight_bytes: int
    kv_token_bytes: float
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
            kv_token_bytes = ranks.facts[0]["kv_bytes"] / ranks.facts[0]["kv_tokens"]
            answers[name] = Answers(weight_bytes, kv_token_bytes, **_gathered(found))
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
    chosen: dict[str, Any] = dict(VARIANTS[name])
    config = replace(
        config,
        **chosen,
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


def _gathered(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank r answered every R-th from the r-th on."""
    return {key: _interleaved([answer[key] for answer in found]) for key in found[0]}


def _interleaved(parts: list[list[Any]]) -> list[Any]:
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def report(run: QuantRun, command: str) -> Report:
    notes = {
        "text": run.options.text.name,
        "settings": run.options.settings,
        "meaning": {
            "log_likelihood": "nats per token, a value a window; its mean beside it",
            "variant": "fp8: products and experts; fp8 kv: the KV cache alone",
            "log_likelihood_difference": "FP8 less BF16",
            "same_likeliest": "share of the text's positions at which both name the same token",
            "same_greedy": "share of a prompt's new tokens, position by position: nothing after "
            "the first difference need agree",
        },
    }
    return Report(command, run.device, tuple(_cases(run)), notes)


def _cases(run: QuantRun) -> Iterator[Case]:
    text = {"windows": len(run.windows), "context": run.options.context}
    for name, answers in run.answers.items():
        scored = [x for window in answers.logprobs for x in window]
        more = {"mean": fmean(scored), "tokens": len(scored)}
        shape = {"variant": name, **_shape(run), **text}
        yield case_of("log_likelihood", answers.means, "nats", "higher", shape, more=more)
    for name in list(VARIANTS)[1:]:
        yield from _compared(run, name, text)
    for name, answers in run.answers.items():
        held, shape = [answers.weight_bytes / 2**20], {"variant": name, **_shape(run)}
        yield case_of("weights", held, "MiB", "lower", shape)
        yield case_of("kv_token", [answers.kv_token_bytes], "B", "lower", shape)


def _compared(run: QuantRun, name: str, text: dict[str, int]) -> Iterator[Case]:
    bf16, fp8 = run.answers["bf16"], run.answers[name]
    both = {"variant": f"{name} / bf16", **_shape(run)}
    differences = [b - a for a, b in zip(bf16.means, fp8.means, strict=True)]
    likeliest = _shares(bf16.likeliest, fp8.likeliest)
    for what, values, unit in (
        ("log_likelihood_difference", differences, "nats"),
        ("same_likeliest", likeliest, "%"),
    ):
        mean = {"mean": fmean(values)}
        yield case_of(what, values, unit, "higher", {**both, **text}, more=mean)
    pairs = list(zip(bf16.greedy, fp8.greedy, strict=True))
    firsts = [_first_difference(*pair) for pair in pairs]
    new = {"prompts": len(pairs), "output_len": run.options.output_len}
    same = _shares(bf16.greedy, fp8.greedy)
    found = {"identical": firsts.count(None), "first_difference": firsts}
    yield case_of("same_greedy", same, "%", "higher", {**both, **new}, more=found)


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
