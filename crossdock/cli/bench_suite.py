"""`bench suite`: flags to options; the work is in the room `bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from crossdock.cli.bench import command_line
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import Device


def suite(
    ctx: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="Rank processes. [default: all visible GPUs; 8 on CPUs]")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="A list, by the names of their documents; also steps-MODEL and compare-MODEL, "
            "which else do not run.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="For all of it.")] = 9.5,
    folder: Annotated[
        Path, typer.Option("--out", help="Where each part's JSON document goes.")
    ] = Path("benchmarks/suite"),
    device: Device = None,
    json: JsonFlag = False,
) -> None:
    """Everything that several GPUs are measured by, within a given time: comm, moe, engine with
    overlap and without (from 4 GPUs on one model of them), balance live. On CPUs a dry run in
    Triton's interpreter. Exit code 1 if a part is missing."""
    from crossdock.bench import suite as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks

    count, kind = choose_ranks(ranks, device, on_cpu=8)
    every = bench.gpu_parts(count) if kind == "cuda" else bench.host_parts(count)
    wanted = bench.chosen(every, parts)
    output = output_of(ctx)
    with output.stages() as on_progress:
        outcomes = bench.run_suite(wanted, 60 * minutes, folder, on_progress)
    shown: list[RenderableType] = []
    for outcome in outcomes:
        if outcome.document is not None:
            shown += [render(bench.report_of(outcome)), ""]
            for name, why in outcome.document.get("refused", {}).items():
                shown.append(Text(f"{outcome.part.name}: {name} did not run: {why}", style="red"))
    if kind != "cuda":
        shown.append(Text("a rehearsal of the GPUs' commands: times are the interpreter's"))
    shown.append(Text(f"documents of the parts: {folder}"))
    missing = [o for o in outcomes if o.document is None]
    shown += [Text(f"missing: {o.part.name}: {o.why}", style="red") for o in missing]
    output.result(bench.document(outcomes, command_line()), Group(*shown))
    if missing:
        raise typer.Exit(1)
