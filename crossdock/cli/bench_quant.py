"""`bench quant`: flags to options; the work is in the room `bench`."""

from pathlib import Path
from typing import Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import ConfigFile, Device, Model, settings


def quant(
    ctx: typer.Context,
    model: Model,
    text: Annotated[Path, typer.Option(help="A text file that the model was not trained on.")],
    ranks: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window of the text.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="At most so many are scored.")] = 64,
    prompts: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Windows whose beginnings go on.")
    ] = 16,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a beginning.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 64,
    device: Device = None,
    config: ConfigFile = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """What FP8 products, and an FP8 KV cache, do to answers, beside BF16: log-likelihood of a text
    and greedy tokens. On CPUs kernels run in Triton's interpreter, for very small models."""
    from crossdock.bench import quant as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks

    count, kind = choose_ranks(ranks, device, on_cpu=1)
    fields, _ = settings(config)
    for name in ("device", "ranks", "model"):
        fields.pop(name, None)
    options = bench.QuantOptions(
        model, text, count, kind, context, windows, prompts, prompt_len, output_len, fields
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_quant(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)
