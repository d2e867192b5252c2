"""Where a step's time goes, on a terminal: parts beside one another, then phases, then ceilings."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.bench.engine_parts import PARTS
from crossdock.bench.report import Case

INSIDE = ("wait", "counts", "dispatch_apart", "combine_apart")
"""Parts of other parts, or beside them on a stream of their own."""


def parts_tables(cases: Sequence[Case], name_of: Any) -> list[RenderableType]:
    """Of the cases that tell. `name_of(case)`: what a column is called."""
    told = [case for case in cases if "parts_ms" in case.more]
    shown: list[RenderableType] = []
    if told:
        shown += ["", _table("ms of a step", {name_of(c): c.more["parts_ms"] for c in told})]
    phases = {
        f"{name_of(case)}: {phase} ({seen['steps']})": seen
        for case in told
        for phase, seen in case.more.get("phases", {}).items()
    }
    if phases:
        split = {name: _whole(seen["parts_ms"]) for name, seen in phases.items()}
        table = _table("ms of a traced step", split)
        for share in ("mfu", "mbu"):
            table.add_row(f"  {share}", *(f"{seen[share]:.1%}" for seen in phases.values()))
        shown += ["", table]
    ceilings = [case.more["ceilings"] for case in cases if "ceilings" in case.more]
    if ceilings:
        shown += ["", Text(ceilings_line(ceilings[0]))]
    return shown


def ceilings_line(ceilings: Mapping[str, Any]) -> str:
    flops, nbytes = ceilings["flops_per_s"] / 1e12, ceilings["bytes_per_s"] / 1e9
    return (
        f"ceilings of a rank: {flops:,.3g} TFLOP/s of a large product, {nbytes:,.4g} GB/s of a "
        f"large copy, read and written ({ceilings['source']})"
    )


def _whole(parts: Mapping[str, float]) -> dict[str, float]:
    """The step split into its parts, what is in none as "other"."""
    known = [part for part in PARTS if part in parts]
    more = [part for part in parts if part not in (*PARTS, *INSIDE, "step")]
    split = {part: parts[part] for part in (*known, *more)}
    inside = {part: parts[part] for part in INSIDE if part in parts}
    return {**split, "other": parts["step"] - sum(split.values()), **inside}


def _table(title: str, columns: Mapping[str, Mapping[str, float]]) -> Table:
    """`columns`: ms by part."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    longest_first = sorted(columns.values(), key=len, reverse=True)
    for part in dict.fromkeys(part for parts in longest_first for part in parts):
        name = f"{part}, within or beside others" if part in INSIDE else part
        table.add_row(f"  {name}", *(_share(parts, part) for parts in columns.values()))
    table.add_row("  step", *(_ms(_sum(parts)) for parts in columns.values()), style="bold")
    return table


def _share(parts: Mapping[str, float], part: str) -> str:
    if part not in parts:
        return ""
    whole = _sum(parts)
    return f"{_ms(parts[part])} {parts[part] / whole:4.0%}" if whole > 0 else _ms(parts[part])


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _sum(parts: Mapping[str, float]) -> float:
    return sum(value for part, value in parts.items() if part not in INSIDE)
