"""`bench engine`: flags to options; the work is in the room `bench`."""

from pathlib import Path
from typing import Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import ConfigFile, Device, Model, Quantize, settings
from crossdock.core import ConfigError


def engine(
    ctx: typer.Context,
    model: Model,
    vs: Annotated[
        str | None, typer.Option(help="Beside another engine: transformers.", show_default=False)
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks; a list such as 1,4 is compared.")] = "1",
    threads: Annotated[str, typer.Option(help="CPU threads a rank, for each of --ranks.")] = "1",
    tp: Annotated[
        str, typer.Option(help="Ranks of an attention group, for each of --ranks.")
    ] = "1",
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Compare with invariant mode too.")
    ] = False,
    overlap: Annotated[
        str | None,
        typer.Option(help="off, sbo, tbo or auto; a list is compared.", show_default=False),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="all, or a list of transport, graphs, dispatch-mode, overlap, tp, "
            "kv-cache-dtype, each or one value of it such as overlap=tbo: engines that differ from "
            "the default in that alone. On GPUs one after another, the default first and again "
            "last.",
            show_default=False,
        ),
    ] = None,
    anchors: Annotated[
        str | None,
        typer.Option(
            help="all, or a list of the loads of recipes/anchors.toml, with its settings: rates "
            "per GPU, beside stored figures of another engine.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Prompts, all at once.")
    ] = 32,
    input_len: Annotated[str, typer.Option(help="Tokens: N, or LOW:HIGH.")] = "20:200",
    output_len: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, a prompt a line. [default: random tokens]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 5,
    load: Annotated[
        str | None,
        typer.Option(
            help="dummy: random weights for a config.json or a shipped one by its name, such as "
            "qwen3-30b-a3b.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Only the first layers of the model.", show_default=False)
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="uniform or zipf:A in place of the router's choice.")
    ] = None,
    quantize: Quantize = None,
    device: Device = None,
    target: Annotated[float | None, typer.Option(min=0, help="The ratio to reach.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a timeline of the first engine's first steps (Perfetto's JSON)."),
    ] = None,
    config: ConfigFile = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Tokens per second without HTTP; what is compared runs in one command, on CPUs in turns."""
    from crossdock.bench import engine as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.engine_variants import parse_compared
    from crossdock.bench.report import parse_counts, parse_lengths

    if vs not in (None, "transformers"):
        raise ConfigError(f"--vs {vs!r}: expected transformers")
    lengths = parse_lengths(input_len, "--input-len")
    if len(lengths) > 1:
        raise ConfigError(f"--input-len {input_len!r}: one length or one range")
    given = {"load": load, "layers": layers, "routing": routing, "quantize": quantize}
    fields, _ = settings(config, device=device, **given)
    if anchors is not None:
        for name in ("num_prompts", "input_len", "output_len", "prompts"):
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--anchors has loads of its own; leave out {flag}")
        from crossdock.bench.anchors import Anchors

        fields = {**Anchors().settings, **fields}
    options = bench.EngineOptions(
        model=model,
        ranks=parse_counts(ranks, "--ranks"),
        threads=parse_counts(threads, "--threads"),
        tp=parse_counts(tp, "--tp"),
        invariant=invariant,
        overlap=tuple(overlap.split(",")) if overlap else (fields.get("overlap", "auto"),),
        compare=parse_compared(compare) if compare else (),
        vs_transformers=vs is not None,
        anchors=tuple(anchors.split(",")) if anchors else (),
        num_prompts=num_prompts,
        input_len=lengths[0],
        output_len=output_len,
        prompts_file=prompts,
        repeats=repeats,
        target=target,
        trace=trace,
        settings=fields,
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_engines(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)
    for name, why in report.notes["refused"].items():
        output.notes.print(f"{name} did not run: {why}", style="red", markup=False)
