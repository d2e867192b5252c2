"""What `plan` does once its flags are known."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crossdock.cli.output import Output
from crossdock.core import ConfigError, UserError
from crossdock.core.recipes import recipe_names
from crossdock.planner import (
    Answer,
    Item,
    Observed,
    Question,
    Workload,
    answer_question,
    check_plot,
    checklist,
    compare,
    compared_table,
    document,
    document_day,
    draw,
    explain,
    formats_of,
    load_hardware,
    load_model,
    number_text,
    parse_lengths,
    parse_observed,
    render,
    render_day,
    simulate,
    simulate_day,
    simulation,
    simulation_table,
    validation_document,
    variants,
)
from crossdock.planner.calibration import DEFAULT

MARKS = {"good": "[green]ok  [/]", "look": "[yellow]look[/]", "bad": "[bold red]bad [/]"}


@dataclass(frozen=True)
class PlanOptions:
    model: str | None
    gpu: str | None
    fabric: str | None
    gpus: int | None
    isl: int | None
    osl: int | None
    rate: float | None
    ttft_ms: float
    tpot_ms: float
    zipf: float | None
    weights_dtype: str | None
    kv_dtype: str | None
    lengths: str | None
    price: float | None
    plot: Path | None
    explain: bool
    checklist: bool
    simulate: str | None
    compare: str | None


def run_plan(options: PlanOptions, observed: Observed | None, output: Output) -> None:
    question = _question(options)
    if options.plot is not None:
        check_plot(options.plot)
    if options.lengths is not None and not options.explain:
        raise ConfigError("--lengths goes with --explain, which shows what pages waste")
    if options.compare is not None and options.simulate is None:
        raise ConfigError("--compare goes with --simulate TRACE or poisson:RATE")
    with output.progress() as tell:
        found = answer_question(question, on_progress=tell)
    result = document(found)
    shown: list[RenderableType] = [render(found)]
    if observed is not None:
        result["observed"] = asdict(observed)
        shown.append(_lines("The server now", observed.lines()))
    if options.explain:
        held = None if options.lengths is None else parse_lengths(options.lengths)
        result["explain"] = explain(found, held)
        shown += [_lines(title, lines) for title, lines in result["explain"].items()]
    if options.checklist:
        items = checklist(found, observed)
        result["checklist"] = [asdict(item) for item in items]
        shown.append(_checklist(items))
    if options.simulate is not None:
        result["simulation"], table = _simulated(found, options, output)
        shown.append(table)
    if options.plot is not None:
        draw(found, options.plot)
        result["plot"] = str(options.plot)
        shown.append(Text(f"drawn: {options.plot}"))
    output.result(result, Group(*_spaced(shown)))


def _question(options: PlanOptions) -> Question:
    if options.model is None:
        raise ConfigError(f"which MODEL? A path, a Hugging Face id, or one of {_names('models')}")
    if options.gpu is None:
        raise ConfigError(
            f"which --gpu? A file of `check --measure`, or one of {_names('hardware')}"
        )
    spec, hardware = load_model(options.model), load_hardware(options.gpu, options.fabric)
    for flag, tokens in (("--isl", options.isl), ("--osl", options.osl)):
        if tokens is None:
            raise ConfigError(f"give {flag}, the tokens of a request")
    for flag, value, least in (
        ("--rate", options.rate, "above 0"),
        ("--ttft", options.ttft_ms, "above 0"),
        ("--tpot", options.tpot_ms, "above 0"),
        ("--price", options.price, "at least 0"),
        ("--zipf", options.zipf, "at least 0"),
    ):
        if value is not None and not (value > 0 or (value == 0 and least != "above 0")):
            raise ConfigError(f"{flag} must be {least}, got {value:g}")
    work = Workload(
        isl=options.isl or 0,
        osl=options.osl or 0,
        ttft_s=options.ttft_ms / 1e3,
        tpot_s=options.tpot_ms / 1e3,
        request_rate=options.rate,
        zipf=DEFAULT.real_traffic_zipf if options.zipf is None else options.zipf,
    )
    return Question(
        model=options.model,
        spec=spec,
        hardware=hardware,
        work=work,
        formats=formats_of(spec, options.weights_dtype, options.kv_dtype),
        gpus=options.gpus,
        price=hardware.price_per_gpu_hour if options.price is None else options.price,
    )


def _names(kind: Any) -> str:
    return ", ".join(recipe_names(kind))


def _simulated(
    found: Answer, options: PlanOptions, output: Output
) -> tuple[dict[str, Any], RenderableType]:
    traffic = options.simulate or ""
    with output.progress() as tell:

        def on_progress(share: float) -> None:
            tell("simulating", share, 1.0)

        if traffic.startswith("day:"):
            day = simulate_day(found, Path(traffic.removeprefix("day:")), on_progress)
            return document_day(day), render_day(day)
        config = simulation(found, traffic)
        others = variants(config, options.compare) if options.compare else {}
        began = time.perf_counter()
        result = simulate(config, on_progress)
        table = simulation_table(found, result, time.perf_counter() - began)
        if not others:
            return result.to_json(), table
        compared = compare(others, on_progress)
    made = {**result.to_json(), "compared": compared.to_json()}
    return made, Group(table, "", compared_table(compared.results))


def read_server(url: str) -> Observed:
    """Raises UserError: nothing answers there, or not a crossdock server."""
    import httpx

    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        response = httpx.get(address, timeout=10.0)
        response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"--from {url}: {address} does not answer: {error}; expected the URL of a crossdock "
            "server, such as http://127.0.0.1:8000"
        ) from None
    return parse_observed(response.text)


def show_server(observed: Observed, output: Output) -> None:
    result = {"command": "plan", "observed": asdict(observed)}
    output.result(result, _lines("The server now", observed.lines()))


def run_validation(output: Output) -> None:
    result = validation_document()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", ratio=1)
    for column in ("predicted", "published", "error", "used to\ncalibrate"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            Text(row["name"]),
            number_text(row["predicted"]),
            f"{number_text(row['published'])} {row['unit']}",
            f"{row['error']:+.1%}",
            "yes" if row["calibration"] else "",
        )
        if row["cause"]:
            table.add_row(Padding(Text(row["cause"], style="dim"), (0, 0, 0, 2)))
    orders = [
        f"{'right' if r['right'] else 'WRONG'}: {r['name']} ({r['margin']:.2f} times the other)"
        for r in result["rankings"]
    ]
    medians = [f"{kind}: {error:.1%}" for kind, error in result["median_absolute_error"].items()]
    parts = [
        table,
        _lines("Median absolute error of rows not used to calibrate", medians),
        _lines("Orders that sources found", orders),
        _lines("Where the model is weak", result["weak"]),
    ]
    output.result(result, Group(*_spaced(parts)))


def _checklist(items: list[Item]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Checklist")
    table.add_column("")
    table.add_column("", overflow="fold")
    for item in items:
        table.add_row(MARKS[item.verdict], Text(item.question), Text(item.answer))
    return table


def _lines(title: str, lines: list[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(" -", Text(line))
    return Group(Text(title, style="bold"), table)


def _spaced(parts: list[RenderableType]) -> list[RenderableType]:
    return [item for part in parts for item in (part, "")][:-1]
