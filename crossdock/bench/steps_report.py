"""The cases of `bench steps`."""

from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.steps import Answers, StepsRun
from crossdock.core import EngineConfig

SLOWER = 1.02
"""At most so many times as slow as "off" is a step in the mode that "auto" picked."""
BYTES_OFF = 5.0
"""Percent between one rank's step and what is expected of it by the bytes that it reads."""
MBU = 0.85
GIB = 1 << 30

METHOD = (
    "steps launched in a row, each by all ranks at once, without waiting for the one before; the "
    "mean of the device's time for those in a row, of the slowest rank; works take turns. Batches "
    "are made up, all ranks have one of the same shape. Parts: of steps with events inside, mean "
    "over ranks"
)


def report(run: StepsRun, command: str) -> Report:
    cases = [
        case
        for what in run.options.measure
        for case in {
            "overlap": _overlap,
            "mixed": _mixed,
            "layers": _layers,
            "ranks": _ranks,
            "memory": _memory,
        }[what](run)
    ]
    options, first = run.options, run.facts[0]
    notes = {
        "method": METHOD,
        "settings": options.settings,
        "overlap": first["overlap"],
        "refused": run.refused,
        "graphs": first["graphs"],
        "facts": {key: first[key] for key in ("dtype", "kv_dtype", "transport", "attention")},
    }
    name = run.device or cpu_name()
    device = f"{options.ranks} x {name}" if run.device else name
    return Report(command, device, tuple(cases), notes)


def _shape(run: StepsRun, variant: str, **more: Any) -> dict[str, Any]:
    options = run.options
    return {
        "variant": variant,
        "model": options.model.rstrip("/").rsplit("/", 1)[-1],
        "ranks": options.ranks,
        "layers": run.spec.num_layers,
        "routing": options.settings.get("routing", "real"),
        **more,
    }


def slowest(answers: Answers, work: str) -> list[float]:
    """ms of each turn."""
    return [max(values) for values in zip(*(a["ms"][work] for a in answers), strict=True)]


def _overlap(run: StepsRun) -> Iterator[Case]:
    for batch, answers in run.answers["overlap"].items():
        yield from _modes(run, batch, answers)
        off, auto = slowest(answers, "off"), slowest(answers, "auto")
        picked = answers[0]["how"]["auto"][0]
        yield case_of(
            "auto_over_off",
            [a / b for a, b in zip(auto, off, strict=True)],
            "x",
            "lower",
            _shape(run, f"{batch}: auto picked {picked}", batch=batch),
            target=SLOWER if run.device else None,
        )


def _modes(run: StepsRun, batch: str, answers: Answers) -> Iterator[Case]:
    for mode, how in answers[0]["how"].items():
        shape = _shape(run, f"{batch}: {mode}", batch=batch, mode=mode)
        values = slowest(answers, mode)
        yield case_of("step_time", values, "ms", "lower", shape, more={"how": how[0]})


def _mixed(run: StepsRun) -> Iterator[Case]:
    names = {"one": "one forward", "two": "decodes, then prompts"}
    for batch, answers in run.answers["mixed"].items():
        times = {work: slowest(answers, work) for work in names}
        for work, name in names.items():
            shape = _shape(run, f"{batch}: {name}", batch=batch, forwards=work)
            more = {"how": answers[0]["how"][work]}
            yield case_of("mixed_step", times[work], "ms", "lower", shape, more=more)
        ratios = [a / b for a, b in zip(times["one"], times["two"], strict=True)]
        shape = _shape(run, f"{batch}: one forward / two", batch=batch)
        yield case_of("one_forward_over_two", ratios, "x", "lower", shape)


def _layers(run: StepsRun) -> Iterator[Case]:
    copy = _copy_speed(run)
    for batch, answers in run.answers["layers"].items():
        yield from _modes(run, batch, answers)
    for batch, answers in run.answers["layers parts"].items():
        yield from _of_layers(run, batch, answers)
        if "decodes" in batch:
            yield _mbu(run, batch, answers, copy)


def _of_layers(run: StepsRun, batch: str, answers: Answers) -> Iterator[Case]:
    """Mean over ranks, of each turn."""
    turns = list(zip(*(a["layers"] for a in answers), strict=True))
    for kind in turns[0][0] if turns else ():
        layers = [[of[kind] for of in turn] for turn in turns]
        values = [mean(of["layer"] for of in turn) for turn in layers]
        parts = {
            part: mean(of.get(part, 0.0) for turn in layers for of in turn)
            for part in layers[0][0]
            if part != "layer"
        }
        parts["other"] = mean(values) - sum(parts.values())
        shape = _shape(run, f"{batch}: {kind} layer", batch=batch, kind=kind)
        yield case_of("layer_time", values, "ms", "lower", shape, more={"parts_ms": parts})


def _mbu(run: StepsRun, batch: str, answers: Answers, copy: float) -> Case:
    """Of each rank and turn."""
    shares = [
        nbytes / (parts["experts"] * 1e-3) / copy
        for answer in answers
        for nbytes, parts in zip(answer["experts_bytes"], answer["parts_ms"], strict=True)
        if parts.get("experts")
    ]
    return case_of(
        "experts_mbu",
        shares,
        "share of copy speed",
        "higher",
        _shape(run, f"{batch}: routed experts", batch=batch),
        target=MBU if run.device else None,
        more={
            "copy_gbytes_per_s": copy / 1e9,
            "bytes": median([b for answer in answers for b in answer["experts_bytes"]]),
        },
    )


def _ranks(run: StepsRun) -> Iterator[Case]:
    """One rank's step as expected from all ranks': longer by the bytes of experts that it reads
    beyond theirs, at the speed of a copy; all else is alike. For information: the same with the
    experts' whole time growing as their bytes do, launches and tails included, and that with one
    rank's exchange."""
    (batch, times), (_, many) = _only(run, "ranks"), _only(run, "ranks parts")
    alone = _only(run, "alone ranks parts")[1]
    together = slowest(times, "off")
    measured = slowest(_only(run, "alone ranks")[1], "off")
    copy, held, own = _copy_speed(run), _bytes(many), _bytes(alone)
    read = [ms + 1e3 * (own - held) / copy for ms in together]
    grown = own / held if held else 1.0
    experts = _part(many, "experts")
    scaled = [ms + experts * (grown - 1) for ms in together]
    exchange = sum(_part(alone, part) - _part(many, part) for part in ("dispatch", "combine"))
    count = f"{run.options.ranks} ranks"
    of_bytes = {"copy_gbytes_per_s": copy / 1e9, "experts_bytes": held, "experts_bytes_alone": own}
    of_time = {"experts_bytes_grow": grown, "experts_ms": experts}
    rows: tuple[tuple[str, list[float], dict[str, float]], ...] = (
        (f"{batch}: {count}", together, {}),
        ("one rank, measured", measured, {}),
        (f"one rank, expected: {count} and its further bytes at copy speed", read, of_bytes),
        (f"one rank, {count} with the experts' time grown as their bytes", scaled, of_time),
        (
            "the same, with one rank's exchange",
            [ms + exchange for ms in scaled],
            {"exchange_ms_less": -exchange},
        ),
    )
    for label, values, extra in rows:
        yield case_of("ranks_step", values, "ms", "lower", _shape(run, label), more=extra)
    for label, row, more in (
        ("off its further bytes at copy speed", 2, of_bytes),
        ("off the experts' time grown as their bytes", 3, of_time),
        ("off the same, with its own exchange", 4, {}),
    ):
        base = median(rows[row][1])
        off = [100 * abs(ms / base - 1) for ms in measured]
        yield case_of(
            "one_rank_off_expected",
            off,
            "%",
            "lower",
            _shape(run, f"one rank, {label}"),
            target=BYTES_OFF if run.device and row == 2 else None,
            more=more,
        )


def _only(run: StepsRun, group: str) -> tuple[str, Answers]:
    ((name, answers),) = run.answers[group].items()
    return name, answers


def _copy_speed(run: StepsRun) -> float:
    """Bytes per second, read and written."""
    copies = run.answers["copy"][""]
    return median([rate for answer in copies for rate in answer["bytes_per_s"]])


def _bytes(answers: Answers) -> float:
    """Of the experts that got rows, mean over ranks and turns."""
    return mean(nbytes for answer in answers for nbytes in answer["experts_bytes"])


def _part(answers: Answers, part: str) -> float:
    """ms, mean over ranks and turns."""
    return mean(parts.get(part, 0.0) for answer in answers for parts in answer["parts_ms"])


def _memory(run: StepsRun) -> Iterator[Case]:
    """Of a step; and an estimate of the most tokens that fit: beside what is held but for the
    cache, and one sequence's cache, a peak that grows as between the two largest sizes."""
    answers, facts, settings = run.answers["memory"], run.facts[0], run.options.settings
    sizes = [int(name) for name in answers]
    share = settings.get("gpu_memory_utilization", EngineConfig.gpu_memory_utilization)
    last = list(answers.values())[-1]
    held = max(answer["held_bytes"] for answer in last) - facts["kv_bytes"]
    sequence = facts["kv_bytes"] / facts["kv_tokens"] * settings["max_model_len"]
    room = last[0]["total_bytes"] * share - held - sequence
    for mode in last[0]["peak_bytes"]:
        peaks = [max(a["peak_bytes"][mode] for a in each) for each in answers.values()]
        for tokens, peak in zip(sizes, peaks, strict=True):
            shape = _shape(run, f"{tokens:,} tokens of prompts: {mode}", tokens=tokens, mode=mode)
            yield case_of("step_peak_memory", [peak / GIB], "GiB", "lower", shape)
        slope = peaks[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max((peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2]), 1.0)
        most = sizes[-1] + (room - peaks[-1]) / slope
        more = {"room_gib": room / GIB, "bytes_per_token": slope, "held_gib": held / GIB}
        shape = _shape(run, f"{mode}, estimated", mode=mode)
        yield case_of("most_tokens_that_fit", [most], "tokens a rank", "higher", shape, more=more)
