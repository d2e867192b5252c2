"""`bench engine`: output tokens per second without HTTP, engines and settings interleaved."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from crossdock.bench.child import Child
from crossdock.bench.engine_parts import step_cases
from crossdock.bench.measure import measure_here
from crossdock.bench.report import Case, Report, case_of, cpu_name, write_document
from crossdock.bench.workload import random_prompts
from crossdock.core import ConfigError, EngineConfig
from crossdock.core.ceilings import Ceilings
from crossdock.engine import read_spec
from crossdock.launch.start import find_model, find_tokenizer

WARMUP_TOKENS = 8
STATED = ("load", "layers", "routing", "quantize")
"""Settings that the name of a case says."""
TRACED_STEPS = 400
"""Most steps of a turn that are timed one by one."""


@dataclass(frozen=True)
class EngineOptions:
    """`ranks`, `threads` (per rank) and `tp` (ranks of an attention group) of the same length, or
    of length 1.

    `overlap`: modes to compare. `trace`: where a timeline of the first variant's first steps goes.
    `settings`: further fields of `EngineConfig`. `target`: the ratio to reach, to transformers if
    that runs too, else to the first of our variants.
    """

    model: str
    ranks: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    tp: tuple[int, ...] = (1,)
    invariant: bool = False
    overlap: tuple[str, ...] = ("auto",)
    vs_transformers: bool = False
    num_prompts: int = 32
    input_len: tuple[int, int] = (20, 200)
    output_len: int = 64
    prompts_file: Path | None = None
    repeats: int = 5
    target: float | None = None
    trace: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One engine of the comparison. `ranks` 0: transformers."""

    ranks: int
    threads: int
    invariant: bool = False
    overlap: str = "auto"
    tp: int = 1

    @property
    def name(self) -> str:
        who = f"{self.ranks} rank" + "s" * (self.ranks > 1) if self.ranks else "transformers"
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        overlap = "" if self.overlap == "auto" else f", overlap {self.overlap}"
        tp = "" if self.tp == 1 else f", tp {self.tp}"
        return f"{who}, {threads}{tp}" + (", invariant" if self.invariant else "") + overlap


@dataclass(frozen=True)
class EngineRun:
    """`answers[variant]`: one dict per repeat, as the children answer; `traced[variant]`: of one
    more, whose steps were all timed. `prompt_tokens`: of all prompts together. `ceilings`: of a
    rank's device."""

    options: EngineOptions
    variants: tuple[Variant, ...]
    facts: dict[Variant, dict[str, Any]]
    answers: dict[Variant, list[dict[str, Any]]]
    traced: dict[Variant, dict[str, Any]]
    prompt_tokens: int
    ceilings: Ceilings


OnProgress = Callable[[str], None]


def variants_of(options: EngineOptions) -> tuple[Variant, ...]:
    """Ours in the order asked for, each in every overlap mode and followed by its invariant twins;
    then transformers."""
    given = options.ranks, options.threads, options.tp
    many = max(map(len, given))
    if set(map(len, given)) - {1, many}:
        r, t, tp = map(len, given)
        raise ConfigError(
            f"--ranks has {r} values, --threads {t} and --tp {tp}: give as many of each, or one"
        )
    found = []
    for r, t, tp in zip(*(v * many if len(v) == 1 else v for v in given), strict=True):
        for invariant in (False, True)[: 1 + options.invariant]:
            found += [Variant(r, t, invariant, overlap, tp) for overlap in options.overlap]
    if options.vs_transformers:
        found.append(Variant(0, options.threads[0]))
    if len(set(found)) < len(found):
        raise ConfigError("the same --ranks, --threads, --tp and --overlap are there twice")
    return tuple(found)


def run_engines(options: EngineOptions, on_progress: OnProgress = lambda what: None) -> EngineRun:
    """Starts every variant, then lets them take turns on the same prompts.

    Prefix caching is off: the repeats would be answered from it.
    """
    variants = variants_of(options)
    prompts = _prompts(options)
    warm = {"prompts": prompts, "output_len": min(WARMUP_TOKENS, options.output_len)}
    request = {"prompts": prompts, "output_len": options.output_len}
    answers: dict[Variant, list[dict[str, Any]]] = {v: [] for v in variants}
    with ExitStack() as stack:
        children, facts = {}, {}
        for variant in variants:
            on_progress(f"starting {variant.name}")
            module, settings = _settings(options, variant)
            child = stack.enter_context(Child(module, variant.name, variant.threads))
            children[variant], facts[variant] = child, child.ask(settings)
        for variant, child in children.items():
            on_progress(f"warming up {variant.name}")
            child.ask(warm)
        for turn in range(options.repeats):
            for variant in _order(variants, turn):
                on_progress(f"{turn + 1} of {options.repeats}: {variant.name}")
                answers[variant].append(children[variant].ask(request))
        ceilings = _ceilings(facts[variants[0]], on_progress)
        traced: dict[Variant, dict[str, Any]] = {}
        for variant in variants:
            # What a trace costs is nobody's throughput, so it has a turn of its own.
            if variant.ranks and (options.trace or _on_gpu(facts[variant])):
                on_progress(f"tracing {variant.name}")
                wanted = {
                    "traced_steps": TRACED_STEPS,
                    "timeline": not traced and bool(options.trace),
                }
                traced[variant] = children[variant].ask({**request, **wanted})
    if options.trace is not None:
        first = next(iter(traced.values()))
        write_document(first.pop("timeline"), options.trace, "--trace")
    return EngineRun(options, variants, facts, answers, traced, sum(map(len, prompts)), ceilings)


def _on_gpu(facts: dict[str, Any]) -> bool:
    return str(facts["ranks"][0]["device"]).startswith("cuda")


def _ceilings(facts: dict[str, Any], on_progress: OnProgress) -> Ceilings:
    """As the engine knows them; where nobody does, as this machine shows them now."""
    rank = facts["ranks"][0]
    if rank["ceilings"] is not None:
        return Ceilings(**rank["ceilings"])
    on_progress("measuring what this machine reaches")
    values = measure_here("cuda" if _on_gpu(facts) else "cpu")
    return Ceilings(
        values["matmul_tflop_per_s"][rank["dtype"]] * 1e12,
        values["memory_gbytes_per_s"] * 1e9,
        "measured in this run",
    )


def _order(variants: tuple[Variant, ...], turn: int) -> Iterator[Variant]:
    """Every other turn backwards, so that no engine always follows the same one."""
    return iter(variants) if turn % 2 == 0 else reversed(variants)


def _settings(options: EngineOptions, variant: Variant) -> tuple[str, dict[str, Any]]:
    """`(module, settings)` of the child that runs `variant`."""
    if variant.ranks:
        settings = {
            **options.settings,
            "model": options.model,
            "ranks": variant.ranks,
            "threads": variant.threads,
            "tp": variant.tp,
            "invariant": variant.invariant,
            "overlap": variant.overlap,
            "prefix_caching": False,
        }
        EngineConfig(**settings)  # refuses here what no child could start with
        return "crossdock.bench.engine_ours", settings
    config = EngineConfig(model=options.model, **options.settings)
    settings = {
        "model": options.model,
        "revision": config.revision,
        "device": config.device,
        "dtype": config.dtype,
        "threads": variant.threads,
        "batch": config.for_device("cuda" if config.device == "cuda" else "cpu").max_num_seqs,
    }
    return "crossdock.bench.engine_transformers", settings


def _prompts(options: EngineOptions) -> list[list[int]]:
    config = EngineConfig(options.model, **options.settings)
    config = replace(config, model=str(find_model(config)))
    if options.prompts_file is None:
        vocabulary = range(read_spec(config).vocab_size)
        length = (options.output_len, options.output_len)
        prompts = random_prompts(options.num_prompts, options.input_len, length, vocabulary, "0")
        return [list(p.token_ids) for p in prompts]
    try:
        lines = [line for line in options.prompts_file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {options.prompts_file}: {error.strerror}") from None
    if len(lines) < options.num_prompts:
        raise ConfigError(
            f"--prompts {options.prompts_file}: {len(lines)} lines, --num-prompts asks for "
            f"{options.num_prompts}"
        )
    tokenizer = find_tokenizer(config)
    return [list(tokenizer.encode(line)) for line in lines[: options.num_prompts]]


def report(run: EngineRun, command: str) -> Report:
    cases = [
        *(_throughput(run, v) for v in run.variants),
        *(_prompt_throughput(run, v) for v in run.variants),
        *_ratios(run),
        *(case for v in run.variants if v.ranks for case in _parts(run, v)),
    ]
    notes = {
        "settings": {**run.options.settings, "prefix_caching": False},
        "engines": [{"variant": v.name, **run.facts[v]} for v in run.variants],
    }
    first = run.facts[run.variants[0]]["ranks"][0].get("device", "cpu")
    return Report(command, _device_name(str(first)), tuple(cases), notes)


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(torch.device(device))


def _shape(run: EngineRun, variant: Variant) -> dict[str, Any]:
    options = run.options
    source = options.prompts_file.name if options.prompts_file else options.input_len
    stated = {name: options.settings.get(name) for name in STATED}
    stated = {name: value for name, value in stated.items() if value is not None}
    kind = "".join(f", {name} {value}" for name, value in stated.items())
    return {
        "variant": variant.name + kind,
        **asdict(variant),
        **stated,
        "num_prompts": options.num_prompts,
        "input_len": source,
        "output_len": options.output_len,
    }


def _rates(run: EngineRun, variant: Variant) -> list[float]:
    return [answer["tokens"] / answer["seconds"] for answer in run.answers[variant]]


def _throughput(run: EngineRun, variant: Variant) -> Case:
    against = {v.name: median(_rates(run, v)) for v in run.variants if v != variant}
    return case_of(
        "output_throughput", _rates(run, variant), "tokens/s", "higher", _shape(run, variant),
        against=against,
    )  # fmt: skip


def _prompt_throughput(run: EngineRun, variant: Variant) -> Case:
    """Of the same runs: what counts where outputs are short."""
    rates = [run.prompt_tokens / answer["seconds"] for answer in run.answers[variant]]
    return case_of("input_throughput", rates, "tokens/s", "higher", _shape(run, variant))


def _ratios(run: EngineRun) -> Iterator[Case]:
    """Of neighbours in time: our first to transformers, our others to our first."""
    first, *others = run.variants
    pairs = [(first, v) if v.ranks == 0 else (v, first) for v in others]
    for variant, base in pairs:
        ratios = [a / b for a, b in zip(_rates(run, variant), _rates(run, base), strict=True)]
        targeted = base.ranks == 0 if run.options.vs_transformers else True
        yield case_of(
            "throughput_ratio", ratios, "x", "higher", {**_shape(run, variant), "to": base.name},
            target=run.options.target if targeted else None,
        )  # fmt: skip


def _parts(run: EngineRun, variant: Variant) -> Iterator[Case]:
    traced, shape = run.traced.get(variant), _shape(run, variant)
    yield from step_cases(run.answers[variant], traced, run.ceilings, shape)
    yield _memory(run, variant)


def _memory(run: EngineRun, variant: Variant) -> Case:
    values = [rss / 2**20 for rss in run.answers[variant][-1]["rss_bytes"]]
    return case_of("rank_resident_memory", values, "MiB", "lower", _shape(run, variant))
