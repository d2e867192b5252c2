"""How `bench serve` shows a run: one point in full, or a sweep as one table."""

from math import isnan

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.bench.serve import MS, PointResult, ServeRun


def render(run: ServeRun) -> RenderableType:
    parts: list[RenderableType] = []
    if len(run.points) == 1:
        parts += [_totals(run, run.points[0]), _latencies(run.points[0])]
    else:
        parts.append(_sweep(run))
    errors = dict.fromkeys(error for p in run.points for error in p.errors)
    if errors:
        parts.append(Text(f"{run.failures} requests failed; the first errors:", style="bold red"))
        parts += [Text(f"  {error[:300]}", style="red") for error in list(errors)[:5]]
    return Group(*parts)


def _totals(run: ServeRun, p: PointResult) -> Table:
    result, devices = p.result, run.target.devices
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{run.target.model} at {run.options.url}", overflow="fold")
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column(f"per device ({devices})" if devices else "per device", justify="right")
    table.add_row("successes", str(result.successes), "")
    style = "bold red" if result.failures else ""
    table.add_row("failures", Text(str(result.failures), style=style), "")
    table.add_row("duration, s", f"{result.duration:.2f}", "")
    table.add_row("input tokens", f"{result.input_tokens:,}", "")
    table.add_row("output tokens", f"{result.output_tokens:,}", "")
    rates = {
        "requests/s": result.request_rate,
        "input tokens/s": result.input_rate,
        "output tokens/s": result.output_rate,
    }
    if result.goodput is not None:
        limits = " ".join(f"{k}:{v * MS:g}" for k, v in (run.options.slo or {}).items())
        rates[f"goodput, requests/s ({limits} ms)"] = result.goodput
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.2f}", f"{rate / devices:,.2f}" if devices else "?")
    table.add_row("load generator, cores", f"{p.client_cpu:.2f}", "")
    return table


def _latencies(p: PointResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    for column in ("mean", "median", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, values in p.result.latencies.items():
        table.add_row(
            name.upper(), *("-" if isnan(v) else f"{v * MS:,.2f}" for v in values.values())
        )
    return table


def _sweep(run: ServeRun) -> RenderableType:
    """What all points share is said above, so that a row fits a terminal of 80 columns."""
    head = f"{run.target.model} at {run.options.url}; "
    lengths = {"in": [p.point.input_len for p in run.points],
               "out": [p.point.output_len for p in run.points]}  # fmt: skip
    varied = [name for name, pairs in lengths.items() if len(set(pairs)) > 1]
    if run.options.dataset == "random":
        head += "".join(
            f"{_length(pairs[0])} tokens {name}, "
            for name, pairs in lengths.items()
            if name not in varied
        )
    else:
        head += f"prompts of {run.options.dataset}, "
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = [*_load_columns(run, run.points[0]), *_speed_columns(run, run.points[0])]
    for column, _ in [columns[0], *((name, "") for name in varied), *columns[1:]]:
        table.add_column(column, justify="right", no_wrap=True)
    for index, p in enumerate(run.points):
        load, *rest = [cell for _, cell in (*_load_columns(run, p), *_speed_columns(run, p))]
        table.add_row(load, *(_length(lengths[name][index]) for name in varied), *rest)
    return Group(Text(f"{head}latencies in ms, median and p99"), table)


def _load_columns(run: ServeRun, p: PointResult) -> list[tuple[str, str | Text]]:
    result, devices = p.result, run.target.devices
    columns: list[tuple[str, str | Text]] = [
        ("load", p.point.load),
        ("ok", str(result.successes)),
        ("fail", Text(str(result.failures), style="bold red" if result.failures else "")),
        ("req/s", _short(result.request_rate)),
        ("in/s", _short(result.input_rate)),
        ("out/s", _short(result.output_rate)),
    ]
    if devices:
        columns.append(("/dev", _short(result.output_rate / devices)))
    if result.goodput is not None:
        columns.append(("good", _short(result.goodput)))
    return columns


def _speed_columns(run: ServeRun, p: PointResult) -> list[tuple[str, str]]:
    return [
        (name.upper() if key == "median" else key, _short(p.result.latencies[name][key] * MS))
        for name in ("ttft", "tpot", "e2e")
        for key in ("median", "p99")
    ]


def _length(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}:{pair[1]}"


def _short(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
