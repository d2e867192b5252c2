"""`bench soak`: flags to options; the work is in the room `bench`."""

from typing import Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import ConfigFile, Device, Model, settings


def soak(
    ctx: typer.Context,
    model: Model,
    ranks: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    in_flight: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests open at once, per attention group.")
    ] = 96,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Of the longest answer.")] = 256,
    load: Annotated[
        str | None, typer.Option(help="dummy: random weights.", show_default=False)
    ] = None,
    device: Device = None,
    config: ConfigFile = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Minutes of mixed requests, some of them aborted: none may be lost, no KV page kept, and no
    memory may grow. Set kv_memory_gib low in --config to keep the cache full."""
    from crossdock.bench import soak as bench
    from crossdock.bench.case_table import render

    fields, _ = settings(config, load=load, device=device)
    for name in ("ranks", "model"):
        fields.pop(name, None)
    options = bench.SoakOptions(model, ranks, minutes, in_flight, input_len, output_len, fields)
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_soak(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)
