"""How `bench serve` shows a run: one point in full, or a sweep as one table."""

from math import isnan

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
    table = Table(title=f"{run.target.model} at {run.options.url}", title_justify="left")
    table.add_column("")
    table.add_column("total", justify="right")
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
    table = Table()
    table.add_column("ms")
    for column in ("mean", "median", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, values in p.result.latencies.items():
        table.add_row(
            name.upper(), *("-" if isnan(v) else f"{v * MS:,.2f}" for v in values.values())
        )
    return table


def _sweep(run: ServeRun) -> Table:
    devices = run.target.devices
    title = f"{run.target.model} at {run.options.url}; milliseconds, medians and p99"
    table = Table(title=title, title_justify="left", padding=(0, 0), collapse_padding=True)
    goodput = run.options.slo is not None
    for column in (
        "load", "in", "out", "ok", "fail", "req/s", "in tok/s", "out tok/s", "/device",
        "TTFT", "p99", "TPOT", "p99", "E2E", "p99",
        *(["goodput"] if goodput else []),
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for p in run.points:
        result = p.result
        lengths = (p.point.input_len, p.point.output_len)
        random = run.options.dataset == "random"
        table.add_row(
            p.point.load,
            *(_length(pair) if random else "file" for pair in lengths),
            str(result.successes),
            Text(str(result.failures), style="bold red" if result.failures else ""),
            *(_short(r) for r in (result.request_rate, result.input_rate, result.output_rate)),
            _short(result.output_rate / devices) if devices else "?",
            *(
                _short(values[key] * MS)
                for values in (result.latencies[name] for name in ("ttft", "tpot", "e2e"))
                for key in ("median", "p99")
            ),
            *([_short(result.goodput or 0.0)] if goodput else []),
        )
    return table


def _length(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}:{pair[1]}"


def _short(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
