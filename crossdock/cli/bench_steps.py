"""`bench steps`: flags to options; the work is in the room `bench`."""

from typing import Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import ConfigFile, Device, Model, Quantize, settings


def steps(
    ctx: typer.Context,
    model: Model,
    measure: Annotated[
        str,
        typer.Option(
            help="overlap (each mode and what auto picked, by size), mixed (decodes and prompts in "
            "one forward or two), layers (of each kind; MBU of the experts), ranks (one against "
            "all, by bytes), memory (of a step, with TBO and without)."
        ),
    ] = "overlap,mixed",
    ranks: Annotated[
        int | None, typer.Option(help="Rank processes. [default: all visible GPUs; 2 on CPUs]")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Only the first layers of the model.", show_default=False)
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="real, uniform or zipf:A. [default: uniform]")
    ] = None,
    quantize: Quantize = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 7,
    row: Annotated[int, typer.Option("--steps", min=1, help="In a row, of each turn.")] = 5,
    device: Device = None,
    config: ConfigFile = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Single steps on made-up batches, without requests; settings as of bench engine --anchors."""
    from crossdock.bench.anchors import Anchors
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks
    from crossdock.bench.steps import StepsOptions, run_steps
    from crossdock.bench.steps_report import report

    count, kind = choose_ranks(ranks, device, on_cpu=2)
    fields, _ = settings(config, layers=layers, routing=routing, quantize=quantize)
    fields = {**Anchors().settings, **fields}
    for name in ("ranks", "device", "model"):
        fields.pop(name, None)
    options = StepsOptions(
        model, count, kind, tuple(measure.split(",")), repeats, row, settings=fields
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = run_steps(options, on_progress)
    made = report(run, command_line())
    finish(made.document(), render(made), out, output)
