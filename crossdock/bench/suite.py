"""`bench suite`: all that several GPUs are measured by, one benchmark after another, within a given
time. A part that does not end in its share is named and left out; the others are kept."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from crossdock.bench.report import Case, Report
from crossdock.core import ConfigError

ENGINE_SETTINGS = """\
load = "dummy"
max_num_seqs = 256
max_num_batched_tokens = 8192
max_model_len = 4096
"""
MODELS = ("deepseek-v2-lite", "qwen3-30b-a3b")
LARGE = "qwen3-235b-a22b"
LARGE_FROM = 4
"""GPUs that it fits."""
ZIPF = ENGINE_SETTINGS + 'routing = "zipf:1.0"\nrebalance_step_mib = 64.0\n'
SETTLE_S = 1.5
"""In which the ranks of a part that was ended notice that, and leave the GPUs."""


@dataclass(frozen=True)
class Part:
    """`arguments` of `crossdock bench`; `share` of the time that is left, at most; `settings`: what
    its TOML file says. `extra`: only where it is asked for by name."""

    name: str
    arguments: tuple[str, ...]
    share: float
    settings: str = ""
    extra: bool = False


@dataclass(frozen=True)
class Outcome:
    """`document`: what the benchmark wrote, None where it did not; `why` says so."""

    part: Part
    seconds: float
    document: dict[str, Any] | None
    why: str = ""


def gpu_parts(gpus: int) -> tuple[Part, ...]:
    """The workloads of the figures this project compares itself with, per GPU; `extra` ones: every
    setting of the engine against its default, and what single steps and layers take."""
    count, large = ("--ranks", str(gpus)), gpus >= LARGE_FROM
    exchanges = ("comm", *count, "--tokens", "1,32,128,4096", "--repeats", "3" if large else "5")
    parts = [
        Part("comm", exchanges, 0.2),
        Part("moe", ("moe", *count, "--tokens", "128,4096", "--repeats", "5"), 0.2),
    ]
    loads, turns = ("--anchors", "prefill,decode-256"), "1" if large else "2"
    for model in MODELS:
        # The large model's time is what two more engines of the second one would take.
        alone = large and model != MODELS[0]
        compared = () if alone else ("--compare", "overlap=off")
        engines = ("engine", model, *count, *loads, *compared, "--repeats", turns)
        parts.append(Part(f"engine-{model}", engines, 0.55))
    if large:
        once = ("--quantize", "fp8", "--repeats", "1")
        parts.append(Part(f"engine-{LARGE}", ("engine", LARGE, *count, *loads, *once), 0.7))
    live = ("--requests", str(128 * gpus), "--lengths", "256:640", "--rounds", turns)
    parts.append(Part("balance", ("balance", "--live", MODELS[1], *count, *live), 1.0, ZIPF))
    steps = ("--repeats", "5", "--steps", "4")
    for model in MODELS:
        what = ("--measure", "overlap,mixed,memory" + ",ranks" * (gpus > 1))
        part = Part(f"steps-{model}", ("steps", model, *count, *what, *steps), 0.8, extra=True)
        parts.append(part)
    layers = ("steps", "deepseek-v3", *count, "--layers", "8", "--measure", "layers", *steps)
    parts.append(Part("steps-deepseek-v3", layers, 0.8, extra=True))
    for model in MODELS:
        every = ("engine", model, *count, *loads, "--compare", "all", "--repeats", "1")
        parts.append(Part(f"compare-{model}", every, 1.0, extra=True))
    return tuple(parts)


def chosen(parts: Sequence[Part], names: str | None) -> list[Part]:
    """Those of a comma list, in its order; without one all that are not extra.

    Raises:
        ConfigError: a name that none has; lists them.
    """
    if names is None:
        return [part for part in parts if not part.extra]
    known = {part.name: part for part in parts}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ConfigError(f"--parts {unknown[0]!r}: expected some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names.split(","))]


def host_parts(ranks: int) -> tuple[Part, ...]:
    """The same in small, on CPU ranks: the kernels in Triton's interpreter, so no timing."""
    count = ("--ranks", str(ranks), "--device", "cpu")
    shape = ("--hidden", "256", "--experts", str(8 * ranks))
    return (
        Part(
            "comm",
            ("comm", *count, "--transport", "nvlink", *shape, "--top-k", "2", "--tokens", "2",
             "--exchanges", "1", "--repeats", "1"),
            0.5,
        ),
        Part("moe", ("moe", *count, *shape, "--width", "128", "--tokens", "2", "--layers", "1",
                     "--repeats", "1"), 0.7),
    )  # fmt: skip


def run_suite(
    parts: Sequence[Part], seconds: float, folder: Path, on_progress: Callable[[str], None]
) -> list[Outcome]:
    """Runs `parts` in turn; each leaves `folder`/NAME.json, or in NAME.log all that it said."""
    folder.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + seconds, []
    for part in parts:
        left = end - time.monotonic()
        on_progress(f"{part.name}, {left:.0f} s left")
        outcomes.append(_run(part, left * part.share, folder / f"{part.name}.json"))
    return outcomes


def _run(part: Part, limit: float, out: Path) -> Outcome:
    command = [sys.executable, "-m", "crossdock", "bench", *part.arguments, "--out", str(out)]
    begin, log = time.monotonic(), out.with_suffix(".log")
    for left in (out, log):
        left.unlink(missing_ok=True)
    if part.settings:
        out.with_suffix(".toml").write_text(part.settings)
        command += ["--config", str(out.with_suffix(".toml"))]
    if limit <= 0:
        return Outcome(part, 0.0, None, "no time was left")
    why = ""
    # A file, not a pipe: ranks have sessions of their own, and may be slow to notice their end.
    with (
        log.open("w") as said,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the children that run its engines
            time.sleep(SETTLE_S)
            why = f"did not end within its {limit:.0f} s; it last said: "
    seconds = time.monotonic() - begin
    if out.exists() and not why:
        log.unlink()
        return Outcome(part, seconds, json.loads(out.read_text()))
    lines = log.read_text(errors="replace").strip().splitlines()
    last = (lines or [f"nothing, exit code {process.returncode}"])[-1]
    return Outcome(part, seconds, None, why + last)


def report_of(outcome: Outcome) -> Report:
    """What a part wrote, to be shown as that benchmark shows it."""
    document = outcome.document
    assert document is not None
    known = {field.name for field in fields(Case)} - {"more"}
    cases = []
    for case in document["cases"]:
        given = {key: case[key] for key in known if key in case}
        middle, low, high = (
            float("nan") if x is None else x for x in (given["median"], *given["quartiles"])
        )
        more = {key: value for key, value in case.items() if key not in known | {"reached"}}
        given |= {"median": middle, "quartiles": (low, high), "more": more}
        cases.append(Case(**given))
    return Report(document["command"], document["device"], tuple(cases))


def document(outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """All documents in one, by part."""
    return {
        "command": command,
        "parts": {o.part.name: o.document for o in outcomes if o.document is not None},
        "seconds": {o.part.name: round(o.seconds, 1) for o in outcomes},
        "missing": {o.part.name: o.why for o in outcomes if o.document is None},
    }
