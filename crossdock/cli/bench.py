"""`bench ...`: flags to options; the work is in the room `bench`."""

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from crossdock.cli.output import JsonFlag, Output, output_of
from crossdock.cli.settings import Device, Model
from crossdock.core import ConfigError
from crossdock.core.env import read_env


def _writable(out: Path | None) -> Path | None:
    """Before the work, not after it."""
    if out is not None:
        from crossdock.bench.report import check_writable

        check_writable(out)
    return out


OutFile = Annotated[
    Path | None,
    typer.Option("--out", help="Write the JSON document here too.", callback=_writable),
]


def serve(
    ctx: typer.Context,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests open at once; a list such as 1,8,32 is swept.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, Poisson; inf: all at once.")
    ] = float("inf"),
    input_len: Annotated[
        str, typer.Option(help="Tokens: N or LOW:HIGH; a list such as 128,1024 is swept.")
    ] = "128",
    output_len: Annotated[str, typer.Option(help="As --input-len.")] = "64",
    num_prompts: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests of each point.")
    ] = 100,
    dataset: Annotated[str, typer.Option(help="random, or sharegpt:FILE.")] = "random",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms that a good request keeps: ttft:500 tpot:50 e2e:9000."),
    ] = None,
    more_limits: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of prompts and arrivals; the same twice is answered from the prefix cache. "
            "[default: a new one]"
        ),
    ] = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """A load over HTTP: throughput, latencies, goodput. Exit code 1 if any request failed."""
    from crossdock.bench import serve as bench
    from crossdock.bench.report import parse_counts, parse_lengths
    from crossdock.bench.serve_table import render
    from crossdock.bench.stats import parse_slo

    if more_limits and not goodput:
        raise ConfigError(f"unexpected argument {more_limits[0]!r}")
    if not request_rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {request_rate:g}")
    options = bench.ServeOptions(
        url=url,
        model=model,
        api_key=read_env().api_key,
        concurrency=parse_counts(concurrency, "--concurrency") if concurrency else (),
        request_rate=request_rate,
        input_lens=parse_lengths(input_len, "--input-len"),
        output_lens=parse_lengths(output_len, "--output-len"),
        num_prompts=num_prompts,
        dataset=dataset,
        slo=parse_slo([*(goodput or []), *(more_limits or [])]) or None,
        seed=secrets.randbits(31) if seed is None else seed,
    )
    output = output_of(ctx)
    with output.stages() as stage:
        run = bench.run_load(options, lambda done, total: stage(f"{done} of {total} requests"))
    finish(bench.report(run, command_line()).document(), render(run), out, output)
    if run.failures:
        if output.as_json:
            for error in dict.fromkeys(error for p in run.points for error in p.errors[:3]):
                output.notes.print(f"failed: {error}", style="red", markup=False)
        raise typer.Exit(1)


def comm(
    ctx: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="Rank processes. [default: all visible GPUs; 4 on CPUs]")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Of each rank; a list gives a case each. [1,32,128,4096; CPU: 1,8,64]"),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Values of a row. [7168; CPU: 256]")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="One slot each. [256; CPU: 32]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token. [8; CPU: 4]")] = None,
    exchanges: Annotated[
        int | None, typer.Option(min=1, help="Of each turn. [10; CPU: 20]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 15,
    device: Device = None,
    transport: Annotated[
        str | None,
        typer.Option(help="nvlink, or of CPU ranks shm. On CPUs nvlink is interpreted: no timing."),
    ] = None,
    pattern: Annotated[str, typer.Option(help="nvlink: uniform or one-rank.")] = "uniform",
    programs: Annotated[
        int | None, typer.Option(min=1, help="nvlink: most programs of a kernel.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(min=0, help="shm: how many times faster than collective to be.")
    ] = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Dispatch and combine between ranks, beside NCCL and the link's own speed; on CPUs shm beside
    collective."""
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks
    from crossdock.bench.report import parse_counts

    count, kind = choose_ranks(ranks, device, on_cpu=4)
    chosen = transport or ("nvlink" if kind == "cuda" else "shm")
    if chosen not in ("nvlink", "shm") or (chosen == "shm" and kind == "cuda"):
        raise ConfigError(f"--transport {chosen!r}: expected nvlink, or with --device cpu shm")
    given = {"hidden": hidden, "experts": experts, "top_k": top_k}
    sizes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if tokens is not None:
        sizes["tokens"] = parse_counts(tokens, "--tokens")
    output = output_of(ctx)
    if chosen == "nvlink":
        if target is not None:
            raise ConfigError("--target is for shm; nvlink's figures have their own")
        from crossdock.bench import comm_gpus

        if exchanges is not None:
            sizes["reps"] = exchanges
        on_gpus = comm_gpus.GpuCommOptions(
            count, kind, pattern=pattern, programs=programs, turns=repeats, **sizes
        )
        with output.stages() as on_progress:
            gpu_run = comm_gpus.run_comm(on_gpus, on_progress)
        report = comm_gpus.report(gpu_run, command_line())
    else:
        from crossdock.bench import comm as bench

        if exchanges is not None:
            sizes["exchanges"] = exchanges
        options = bench.CommOptions(ranks=count, repeats=repeats, target=target, **sizes)
        with output.stages() as on_progress:
            run = bench.run_comm(options, on_progress)
        report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)


def experts(
    ctx: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="GPUs that do the same. [default: all visible]")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help="LAYOUT:SLOTSxROWS, a list. [grouped:32x1024,..., masked:128x16]"),
    ] = None,
    width: Annotated[int, typer.Option(help="Values of a row.")] = 7168,
    outputs: Annotated[int, typer.Option(help="Values that come of it.")] = 4096,
    products: Annotated[int, typer.Option("--products", min=1, help="Of each turn.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 15,
    device: Device = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Products of rows with the weights of their experts: our kernels, torch's and DeepGEMM's."""
    from crossdock.bench import experts as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks

    count, kind = choose_ranks(ranks, device, on_cpu=1, interpreted=True)
    chosen = bench.parse_shapes(shapes or bench.SHAPES)
    options = bench.ExpertsOptions(count, kind, chosen, width, outputs, products, repeats)
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_experts(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)


def attention(
    ctx: typer.Context,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="ROWS:KIND:SEQUENCESxLENGTH, a list; ROWS decode or prompt, KIND mla-HEADS or "
            "gqa-HEADS/KV. [decode:gqa-32/4:128x4096,..., prompt:mla-16:4x2048]"
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    products: Annotated[int, typer.Option("--products", min=1, help="Of each turn.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 15,
    device: Device = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """Attention without its projections, on one GPU: our kernels over a BF16 and an FP8 cache, and
    FlashInfer's."""
    from crossdock.bench import attention as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks

    _, kind = choose_ranks(1, device, on_cpu=1, interpreted=True)
    chosen = bench.parse_shapes(shapes or bench.SHAPES)
    options = bench.AttentionOptions(kind, chosen, page_size, products, repeats)
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_attention(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)


def moe(
    ctx: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="Rank processes. [default: all visible GPUs]")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Of each rank; a list gives cases each.")
    ] = "128,4096",
    hidden: Annotated[int, typer.Option(min=1, help="Values of a row.")] = 7168,
    width: Annotated[int, typer.Option(min=1, help="Of an expert.")] = 2048,
    experts: Annotated[int, typer.Option(min=1, help="One slot each.")] = 256,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Of each turn.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 15,
    device: Device = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """A whole MoE layer as DeepSeek-V3's, router to combine: times, and where they go."""
    from dataclasses import replace

    from crossdock.bench import moe as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.ranks import choose_ranks
    from crossdock.bench.report import parse_counts

    count, kind = choose_ranks(ranks, device, on_cpu=2, interpreted=True)
    spec = replace(bench.V3, num_experts=experts, intermediate_size=width)
    chosen = parse_counts(tokens, "--tokens")
    options = bench.MoEOptions(count, kind, chosen, hidden, spec, layers, repeats)
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_moe(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)


def startup(
    ctx: typer.Context,
    model: Model,
    ranks: Annotated[str, typer.Option(help="Ranks; a list takes turns.")] = "4",
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each.")] = 5,
    idle: Annotated[float, typer.Option(min=0.1, help="Seconds without a request.")] = 10.0,
    target: Annotated[float | None, typer.Option(min=0, help="Seconds to be ready in.")] = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """A server before its first request: seconds to ready, processor while idle, memory."""
    from crossdock.bench import startup as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.report import parse_counts

    options = bench.StartupOptions(model, parse_counts(ranks, "--ranks"), repeats, idle, target)
    output = output_of(ctx)
    with output.stages() as on_progress:
        starts = bench.run_startup(options, on_progress)
    report = bench.report(options, starts, command_line())
    finish(report.document(), render(report), out, output)


def plan(
    ctx: typer.Context,
    ranks: Annotated[
        str, typer.Option(help="Simulated ranks; a list takes turns.")
    ] = "8,64,512,2048",
    rate: Annotated[float, typer.Option(help="Requests per second and rank.")] = 4.0,
    seconds: Annotated[
        float, typer.Option(help="Of simulated time; more for fewer than 512 ranks.")
    ] = 6.0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    hour: Annotated[
        bool, typer.Option("--hour", help="Also an hour's traffic of 96 GPUs.")
    ] = False,
    target: Annotated[
        float | None, typer.Option(min=0, help="Rank-steps per minute to reach.")
    ] = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """The planner's simulator: rank-steps per minute, and how its time grows with ranks."""
    from crossdock.bench import plan as bench
    from crossdock.bench.case_table import render
    from crossdock.bench.report import parse_counts

    if not (rate > 0 and seconds > 0):
        raise ConfigError(f"--rate {rate:g}, --seconds {seconds:g}: both must be above 0")
    options = bench.PlanBenchOptions(
        parse_counts(ranks, "--ranks"), rate, seconds, repeats, hour, target
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_plan(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)


def command_line() -> str:
    """As it was typed."""
    return " ".join(["crossdock", *sys.argv[1:]])


def finish(
    document: dict[str, Any], human: RenderableType, out: Path | None, output: Output
) -> None:
    from crossdock.bench.report import write_document

    output.result(document, human)
    if out is not None:
        write_document(document, out)
