"""A daily load on the model and GPUs of an answer: a fixed size against sizes that follow it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.core import CapacityError, ConfigError
from crossdock.planner.answer import Answer, answer_question
from crossdock.planner.answer_document import number_text, usd_text
from crossdock.planner.answer_tables import item
from crossdock.planner.simulate import DayComparison, DayProfile, compare_sizes, read_profile

MOST_SIZES = 8
"""Sizes that are priced, evenly between the bounds: each takes a search."""


@dataclass(frozen=True)
class Day:
    """`capacity_of`: requests per second by GPUs."""

    profile: DayProfile
    capacity_of: dict[int, float]
    result: DayComparison


def simulate_day(
    answer: Answer, file: Path, on_progress: Callable[[float], None] = lambda share: None
) -> Day:
    """Sizes are whole nodes (or NVLink domains,
    GPUs where one has all) up to the profile's `max_gpus` or the GPUs of the answer; their
    capacities are those of the best deployment of each.

    Raises:
        ConfigError: the profile is wrong, or its peak needs more GPUs.
    """
    q = answer.question
    profile = read_profile(file)
    most = profile.max_gpus or q.gpus or answer.best.gpus
    unit = min(q.hardware.domain_size, most)
    least = max(profile.min_gpus or 0, unit)
    sizes = [size for size in range(unit, most + 1, unit) if size >= least]
    every = -(-len(sizes) // MOST_SIZES)
    sizes = sizes[::-1][::every][::-1]  # the largest among them
    capacity_of: dict[int, float] = {}
    free = replace(q.work, request_rate=None)
    for number, size in enumerate(sizes):
        on_progress(number / len(sizes))
        try:
            found = answer_question(replace(q, gpus=size, work=free), runners_up=0)
        except CapacityError:
            continue  # the model does not fit on so few
        if found.best.capacity > max(capacity_of.values(), default=0.0):
            capacity_of[size] = found.best.capacity
    if not capacity_of:
        raise ConfigError(f"{q.model} does not fit on {sizes} {q.hardware.name}; raise max_gpus")
    on_progress(1.0)
    result = compare_sizes(profile, capacity_of, price_per_gpu_hour=q.price)
    return Day(profile, capacity_of, result)


def render_day(day: Day) -> RenderableType:
    rates = day.profile.requests_per_s
    hours = len(rates) * day.profile.slot_s / 3600
    sizes = ", ".join(f"{size}: {capacity:,.4g}/s" for size, capacity in day.capacity_of.items())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("", "GPUs", "GPU hours", "cost", "changes", "late", "p99 wait, s"):
        table.add_column(column, justify="right" if column else "left")
    for name, result in (
        ("  fixed size", day.result.fixed),
        ("  following", day.result.following),
    ):
        low, high = min(result.sizes), max(result.sizes)
        table.add_row(
            name,
            f"{low}" if low == high else f"{low} to {high}",
            number_text(result.gpu_hours),
            "" if result.cost is None else usd_text(result.cost),
            f"{result.changes}",
            f"{result.late:.2%}",
            f"{result.p99_wait_s:,.2f}",
        )
    return Group(
        Text("A day", style="bold"),
        item(f"{min(rates):,.4g} to {max(rates):,.4g} requests/s over {hours:,.3g} hours"),
        item(f"capacity by GPUs: {sizes}"),
        table,
        item(f"sizes that follow the load save {day.result.saved:.0%} of the GPU hours"),
    )


def document_day(day: Day) -> dict[str, Any]:
    return {"capacity_by_gpus": day.capacity_of, **day.result.to_json()}
