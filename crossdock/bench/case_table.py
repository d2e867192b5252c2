"""How a report's cases look on a terminal."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crossdock.bench.parts_table import parts_tables
from crossdock.bench.report import Case, Report


def render(report: Report) -> RenderableType:
    """The cases under their names, then where the steps' time went, if the cases tell."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for column in ("median", "quartiles", "n", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, unit in dict.fromkeys((case.name, case.unit) for case in report.cases):
        table.add_row(Text(f"{name.replace('_', ' ')}, {unit}", style="bold"))
        for case in report.cases:
            if (case.name, case.unit) == (name, unit):
                table.add_row(
                    Padding(Text(_what(case)), (0, 0, 0, 2)),
                    _number(case.median),
                    " - ".join(_number(q) for q in case.quartiles),
                    str(case.n),
                    target_of(case),
                )
    shown: list[RenderableType] = [Text(f"{report.command}\n{report.device}\n"), table]
    # Of engines that differ in one thing alone, the document has them.
    whole = [c for c in report.cases if not (c.shape.get("changed") or c.shape.get("again"))]
    return Group(*shown, *parts_tables(whole, _what))


def _what(case: Case) -> str:
    if "variant" in case.shape:
        other = f" / {case.shape['to']}" if "to" in case.shape else ""
        return f"{case.shape['variant']}{other}"
    return " ".join(f"{key}={value}" for key, value in case.shape.items())


def target_of(case: Case) -> Text:
    if case.target is None:
        return Text("")
    sign = "<=" if case.better == "lower" else ">="
    style = "green" if case.reached else "bold red"
    return Text(f"{sign} {_number(case.target)} {'yes' if case.reached else 'NO'}", style=style)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
