"""`plan`: flags to a question; the work is in the room `planner`."""

from pathlib import Path
from typing import Annotated

import typer

from crossdock.cli.output import JsonFlag, output_of


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory, a config.json, a TOML of dimensions, a Hugging Face id, or a "
            "shipped description such as deepseek-v3.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A shipped kind such as h100, or a file of `check --measure`."),
    ] = None,
    fabric: Annotated[
        str | None, typer.Option(help="Network between nodes. [default: of the description]")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="GPUs at hand.")] = None,
    isl: Annotated[int | None, typer.Option(min=1, help="Prompt tokens of a request.")] = None,
    osl: Annotated[int | None, typer.Option(min=1, help="Output tokens of a request.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second to serve. [default: as many as can be]"),
    ] = None,
    ttft: Annotated[
        float, typer.Option(metavar="MS", help="Limit of the time to the first token.")
    ] = 5000.0,
    tpot: Annotated[
        float, typer.Option(metavar="MS", help="Limit of the time per output token.")
    ] = 100.0,
    zipf: Annotated[
        float | None,
        typer.Option(help="Skew of the experts' loads, 0: even. [default: of real traffic]"),
    ] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp8. [default: the checkpoint's]")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="bf16 or fp8. [default: bf16]")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N|uniform:A:B|lognormal:MEDIAN:P99|FILE",
            help="Tokens that requests hold, for --explain's KV pages. [default: isl to isl + osl]",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Dollars per GPU hour. [default: of the description]")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the answer: .png, .svg or .pdf.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each formula with its numbers.")
    ] = False,
    checklist: Annotated[
        bool, typer.Option("--checklist", help="Answer the questions to settle before.")
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE|poisson:RATE[:S]|day:FILE",
            help="Run the recommended deployment in the simulator; day: a daily load on sizes that "
            "follow it.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="With --simulate: beside it rebalancing, overlap or ratio otherwise."),
    ] = None,
    from_url: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Read KV and balance of a running server."),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Predictions beside published figures.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """From a model, a kind of GPU and a workload to the layout to run, with reasons and error."""
    from crossdock.cli import planning

    output = output_of(ctx)
    if validate:
        planning.run_validation(output)
        return
    observed = planning.read_server(from_url) if from_url else None
    if model is None and observed is not None:
        planning.show_server(observed, output)
        return
    options = planning.PlanOptions(
        model=model,
        gpu=gpu,
        fabric=fabric,
        gpus=gpus,
        isl=isl,
        osl=osl,
        rate=rate,
        ttft_ms=ttft,
        tpot_ms=tpot,
        zipf=zipf,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        lengths=lengths,
        price=price,
        plot=plot,
        explain=explain,
        checklist=checklist,
        simulate=simulate,
        compare=compare,
    )
    planning.run_plan(options, observed, output)
