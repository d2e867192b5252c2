"""Pictures of an answer: throughput against speed, and where the time of a step goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdock.core import ConfigError
from crossdock.planner.answer import Answer, Question
from crossdock.planner.answer_document import part_name
from crossdock.planner.search_deployment import Deployment, name_of
from crossdock.planner.search_points import Point, frontier

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {
    "attention_projections": "#1f4e79",
    "attention_kv": "#2e75b6",
    "router": "#9dc3e6",
    "dispatch": "#c55a11",
    "combine": "#f4b183",
    "all_reduce": "#843c0c",
    "experts": "#548235",
    "shared_expert": "#a9d18e",
    "dense": "#c5e0b4",
    "lm_head": "#7f7f7f",
    "small_kernels": "#bfbfbf",
    "step": "#595959",
    "uncaptured_launches": "#ffd966",
}


def check_plot(path: Path) -> None:
    """Raises ConfigError for a kind of file that is not drawn, before anything is searched."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: expected a name ending in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: no directory {path.parent}")


def plot(answer: Answer, path: Path) -> None:
    """Writes the picture. Imports matplotlib, which takes a second, only here.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _pareto(left, answer)
    _steps(right, answer)
    q = answer.question
    at_hand = f"{q.gpus} x {q.hardware.name}" if q.gpus else q.hardware.name
    figure.suptitle(
        f"{q.model} on {at_hand}, {q.work.isl:,} tokens in, {q.work.osl:,} out "
        f"(predicted; median error {max(answer.errors.values()):.0%})"
    )
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class ParetoPoint:
    """`throughput`: output tokens/s per GPU, prefill's GPUs counted; `speed`: tokens/s per user."""

    speed: float
    throughput: float
    point: Point


def pareto(answer: Answer, experts: str) -> list[ParetoPoint]:
    """Separate roles in ideal balance: each decode point beside the best prefill. Rising speed."""
    found, work = answer.found, answer.question.work
    prefill = [c.best(work.ttft_s) for c in found.prefill if c.layout.experts == experts]
    rates = [p.requests_per_gpu_s for p in prefill if p]
    if not rates:
        return []
    curves = [c for c in found.decode if c.layout.experts == experts]
    best = frontier(p for c in curves for p in c.points)
    return [
        ParetoPoint(1 / p.latency_s, work.osl / (1 / p.requests_per_gpu_s + 1 / max(rates)), p)
        for p in reversed(best)
    ]


def _pareto(axes: Any, answer: Answer) -> None:
    q = answer.question
    for experts, label, colour in (
        ("ep", "experts over ranks (EP), roles in ideal balance", "#2e75b6"),
        ("tp", "experts by TP, roles in ideal balance", "#7f7f7f"),
    ):
        line = pareto(answer, experts)
        if line:
            speeds, rates = [p.speed for p in line], [p.throughput for p in line]
            axes.plot(speeds, rates, color=colour, marker=".", label=label)
            _name_layouts(axes, line, colour)
    for deployments, marker, colour, label in (
        (answer.runners_up, "o", "#c55a11", "runners-up, whole instances"),
        ([answer.best], "*", "#c00000", "recommended"),
        ([answer.runnable] if answer.runnable else [], "s", "#548235", "runs in this version"),
    ):
        _scatter(axes, deployments, q, marker, colour, label)
    if q.work.tpot_s is not None:
        axes.axvline(1 / q.work.tpot_s, color="black", linestyle=":", linewidth=1)
        axes.annotate(
            f"TPOT {q.work.tpot_s * 1e3:g} ms",
            (1 / q.work.tpot_s, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens/s per user (1 / TPOT)")
    axes.set_ylabel("output tokens/s per GPU, prefill's GPUs counted")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _name_layouts(axes: Any, line: Sequence[ParetoPoint], colour: str) -> None:
    """Says at its slowest end and a third of the way which decode layout it is, and its batch."""
    for p in (line[0], line[len(line) // 3]):
        axes.annotate(
            f"{name_of(p.point.layout)}, {p.point.batch:,.3g} seq.",
            (p.speed, p.throughput),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=7,
            color=colour,
        )


def _scatter(
    axes: Any, deployments: Sequence[Deployment], q: Question, marker: str, colour: str, label: str
) -> None:
    if not deployments:
        return
    axes.scatter(
        [1 / d.tpot_s for d in deployments],
        [d.rate * q.work.osl / d.gpus for d in deployments],
        marker=marker,
        color=colour,
        s=180 if marker == "*" else 36,
        zorder=3,
        label=label,
    )


def _steps(axes: Any, answer: Answer) -> None:
    """Stacked shares of a step; what overlap hides stands above 1."""
    bars = _bars(answer)
    bottoms = [0.0] * len(bars)
    names = dict.fromkeys(name for _, p in bars for name in p.step.parts)
    order = [name for name in COLOURS if name in names]
    order += [name for name in names if name not in COLOURS]
    for name in order:
        heights = [p.step.parts.get(name, 0.0) / p.step.total for _, p in bars]
        if max(heights) < 0.005:
            continue
        axes.bar(
            range(len(bars)),
            heights,
            bottom=bottoms,
            width=0.6,
            color=COLOURS.get(name, "#7030a0"),
            label=part_name(name),
        )
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
    for index, (_, p) in enumerate(bars):
        text = f"{p.step.total * 1e3:,.1f} ms"
        if p.step.hidden > 0:
            text += f"\nand {p.step.hidden * 1e3:,.1f} hidden"
        axes.annotate(
            text,
            (index, bottoms[index]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.set_ylim(0, max(bottoms) * 1.12)
    axes.set_ylabel("share of the step; above 1: hidden by overlap")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _bars(answer: Answer) -> list[tuple[str, Point]]:
    best = answer.best
    bars = [
        (_label("prefill", best.prefill.point), best.prefill.point),
        (_label("decode", best.decode.point), best.decode.point),
    ]
    if answer.tensor_parallel is not None:
        point = answer.tensor_parallel.decode.point
        bars.append((_label("decode", point), point))
    return bars


def _label(role: str, point: Point) -> str:
    layout = point.layout
    experts = name_of(layout)
    what = "tokens" if point.phase == "prefill" else "seq."
    return f"{role}\n{experts}\n{point.batch:,.0f} {what}"
