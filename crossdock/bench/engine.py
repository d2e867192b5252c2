"""`bench engine`: tokens per second without HTTP, engines and settings side by side."""

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from crossdock.bench.anchors import Anchors, Figures, Load
from crossdock.bench.engine_parts import step_cases
from crossdock.bench.engine_run import EngineRun, run_engines
from crossdock.bench.engine_variants import EngineOptions, Variant, variants_of
from crossdock.bench.report import Case, Report, case_of, cpu_name

__all__ = ["EngineOptions", "EngineRun", "report", "run_engines", "variants_of"]

STATED = ("load", "layers", "routing", "quantize")
"""Settings that the name of a case says."""
ONE_BY_ONE = (
    "on GPUs engines ran one after another, in the order of `engines`: started, warmed up, all "
    "repeats, closed; each start was with the kernels that starts before it had compiled, unless "
    "its case says cold"
)
IN_TURNS = "engines were all started, then took turns, every other turn backwards"


def report(run: EngineRun, command: str) -> Report:
    loads, variants = list(run.prompt_tokens), run.variants
    cases = [
        *(case for load in loads for v in variants for case in _throughputs(run, v, load)),
        *(case for load in loads for case in _ratios(run, load)),
        *(case for v in variants if v.ranks for case in _starts(run, v)),
        *(case for v in variants if v.ranks for load in loads for case in _steps(run, v, load)),
        *(case for v in variants if v.ranks for case in _memory(run, v)),
    ]
    notes = {
        "method": ONE_BY_ONE if run.one_by_one else IN_TURNS,
        "settings": {**run.options.settings, "prefix_caching": False},
        "engines": [{"variant": v.name, **run.ran[v].facts} for v in variants],
        "refused": {v.name: ran.refused for v, ran in run.ran.items() if ran.refused},
    }
    count = variants[0].ranks if run.options.anchors else 1
    name = _device_name(run)
    return Report(command, f"{count} x {name}" if count > 1 else name, tuple(cases), notes)


def _device_name(run: EngineRun) -> str:
    device = str(run.ran[run.variants[0]].facts["ranks"][0].get("device", "cpu"))
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(torch.device(device))


def _shape(run: EngineRun, variant: Variant, load: Load | None = None) -> dict[str, Any]:
    options = run.options
    stated = {name: options.settings.get(name) for name in STATED}
    stated = {name: value for name, value in stated.items() if value is not None}
    shape = {
        "variant": _name(options, variant, load, stated),
        "model": options.model,
        **asdict(variant),
        **stated,
    }
    if load is None:
        return shape
    return {
        **shape,
        "load": load.name,
        "num_prompts": load.num_prompts,
        "input_len": options.prompts_file.name if options.prompts_file else load.input_len,
        "output_len": load.output_len,
    }


def _name(
    options: EngineOptions, variant: Variant, load: Load | None, stated: dict[str, Any]
) -> str:
    """Of an anchors' load short: what all have in common is the command's to say."""
    if not options.anchors:
        return variant.name + "".join(f", {name} {value}" for name, value in stated.items())
    of = f"{load.name}: " if load is not None else ""
    return f"{of}{variant.name.replace(', 1 thread', '')}, routing {stated.get('routing')}"


def _tokens(run: EngineRun, variant: Variant, load: Load, prompts: bool) -> list[float]:
    """Per second; of an anchors' load per rank."""
    share = variant.ranks if run.options.anchors and variant.ranks else 1
    answers = run.ran[variant].answers[load]
    counts = [run.prompt_tokens[load] if prompts else answer["tokens"] for answer in answers]
    return [n / answer["seconds"] / share for n, answer in zip(counts, answers, strict=True)]


def _rates(run: EngineRun, variant: Variant, load: Load) -> list[float]:
    """What the load is judged by."""
    return _tokens(run, variant, load, prompts=bool(run.options.anchors) and load.counts_input)


def _unit(run: EngineRun) -> str:
    if not run.options.anchors:
        return "tokens/s"
    return "tokens/s/GPU" if run.one_by_one else "tokens/s/rank"


def _throughputs(run: EngineRun, variant: Variant, load: Load) -> Iterator[Case]:
    """Output tokens and, of the same runs, tokens of prompts, which is what counts where outputs
    are short; of an anchors' load what it is judged by alone."""
    kinds = (load.counts_input,) if run.options.anchors else (False, True)
    figures = _figures(run, variant, load)
    for prompts in kinds:
        others = [v for v in run.variants if v != variant]
        against = {v.name: median(_tokens(run, v, load, prompts)) for v in others}
        yield case_of(
            "input_throughput" if prompts else "output_throughput",
            _tokens(run, variant, load, prompts),
            _unit(run),
            "higher",
            _shape(run, variant, load),
            against={**against, **figures.stored},
            target=figures.asked,
            more={"seconds": [answer["seconds"] for answer in run.ran[variant].answers[load]]},
        )


def _figures(run: EngineRun, variant: Variant, load: Load) -> Figures:
    """None of other settings than those of the anchors."""
    if not run.options.anchors or not _as_asked(variant):
        return Figures({}, None)
    where = run.options.model, _device_name(run), variant.ranks, run.options.settings
    return Anchors().rates(*where, load.name)


def _as_asked(variant: Variant) -> bool:
    plain = variant.tp == 1 and variant.overlap == "auto" and not variant.invariant
    return bool(variant.ranks) and plain and variant.changed is None


def _ratios(run: EngineRun, load: Load) -> Iterator[Case]:
    """Our first to transformers, our others to our first: of neighbours in time where they took
    turns, else to the median of all that the first did."""
    first, *others = run.variants
    pairs = [(first, v) if v.ranks == 0 else (v, first) for v in others]
    eager = next((v for v in others if v.changed == ("graphs", "off")), None)
    # The collective transport runs eagerly, so that beside it graphs are missing too.
    pairs += [(v, eager) for v in others if eager and v.changed == ("transport", "collective")]
    for variant, base in pairs:
        rates, bases = _rates(run, variant, load), _rates(run, base, load)
        if run.one_by_one:
            bases = [median(bases)] * len(rates)
        ratios = [a / b for a, b in zip(rates, bases, strict=True)]
        targeted = base.ranks == 0 if run.options.vs_transformers else variant.changed is None
        yield case_of(
            "throughput_ratio",
            ratios,
            "x",
            "higher",
            {**_shape(run, variant, load), "to": base.name},
            target=run.options.target if targeted else None,
        )


def _starts(run: EngineRun, variant: Variant) -> Iterator[Case]:
    """Cold and cached ones apart."""
    starts = run.ran[variant].starts
    options, figures = run.options, Figures({}, None)
    if options.anchors and _as_asked(variant):
        where = options.model, _device_name(run), variant.ranks, options.settings
        figures = Anchors().start(*where)
    for cold in (False, True):
        found = [start for start in starts if bool(start.compiled) is cold]
        if not found:
            continue
        shape = _shape(run, variant)
        shape = {**shape, "cold": cold, "variant": shape["variant"] + ", cold" * cold}
        yield case_of(
            "start_to_first_token",
            [start.first_token_s for start in found],
            "s",
            "lower",
            shape,
            against=figures.stored,
            target=None if cold else figures.asked,
            more={
                "ready_s": [start.ready_s for start in found],
                "compiled_kernels": [start.compiled for start in found],
            },
        )


def _steps(run: EngineRun, variant: Variant, load: Load) -> Iterator[Case]:
    ran = run.ran[variant]
    traced = ran.traced if load == list(run.prompt_tokens)[-1] else None
    yield from step_cases(ran.answers[load], traced, run.ceilings, _shape(run, variant, load))


def _memory(run: EngineRun, variant: Variant) -> Iterator[Case]:
    ran, shape = run.ran[variant], _shape(run, variant)
    last = list(ran.answers.values())[-1][-1]
    values = [rss / 2**20 for rss in last["rss_bytes"]]
    yield case_of("rank_resident_memory", values, "MiB", "lower", shape)
    if ran.memory_mib:
        yield case_of("device_memory", ran.memory_mib, "MiB", "lower", shape)
