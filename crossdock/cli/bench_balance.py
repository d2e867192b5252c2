"""`bench balance`: flags to options; the work is in the room `bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.cli.settings import ConfigFile, Device, settings
from crossdock.core import ConfigError

if TYPE_CHECKING:
    from crossdock.bench.balance_answers import AnswersOptions
    from crossdock.bench.balance_live import LiveOptions


def balance(
    ctx: typer.Context,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Of made loads: each must divide 256. Of --live and --text: one number. "
            "[default: 32,64; of --live 2, of --text 8]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Of each rank, in made loads.")] = 2048,
    windows: Annotated[int, typer.Option(min=1, help="Plans on loads that drift.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Plans that are timed.")] = 30,
    model: Annotated[
        str | None,
        typer.Option(help="Record this model's routing and plan for it too. [default: made loads]"),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            help="Of made loads, some of planning, small, generator, choice, reroute, drift. "
            "[default: all]"
        ),
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Not the planners, but this model served badly placed, while and after it "
            "balances itself.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of --live, at once.")] = 16,
    lengths: Annotated[str, typer.Option(help="Tokens of each, PROMPT:NEW.")] = "32:96",
    rounds: Annotated[int, typer.Option(min=1, help="Of --live, each from the start.")] = 5,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Not the planners, but what methods that change answers do to the balance of "
            "--model, and to the likelihood of this text (plain or .gz), best one that it was not "
            "trained on.",
        ),
    ] = None,
    device: Device = None,
    config: ConfigFile = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """The planners side by side: balance, replicas, moves and planning time."""
    from crossdock.bench import balance as bench
    from crossdock.bench.balance_answers import AnswersOptions
    from crossdock.bench.balance_table import render
    from crossdock.bench.report import parse_counts

    if live is not None:
        from crossdock.bench.balance_live import LiveOptions

        (count,) = parse_counts(ranks or "2", "--ranks")[:1]
        fields, _ = settings(config, device=device)
        _live(ctx, LiveOptions(live, count, requests, *_lengths(lengths), rounds, fields), out)
        return
    if text is not None:
        if model is None:
            raise ConfigError("--text is scored by a model; name one with --model")
        (count,) = parse_counts(ranks or "8", "--ranks")[:1]
        _answers(ctx, AnswersOptions(model, text, count), out)
        return
    counts = parse_counts(ranks or "32,64", "--ranks")
    for count in counts:
        if bench.EXPERTS % count:
            raise ConfigError(f"--ranks {count}: expected a divisor of {bench.EXPERTS}")
    options = bench.BalanceOptions(
        ranks=counts,
        seeds=seeds,
        tokens=tokens,
        windows=windows,
        repeats=repeats,
        model=model,
        measure=bench.MEASURES if measure is None else tuple(measure.split(",")),
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        cases = bench.run_balance(options, on_progress)
    report = bench.report(options, cases, command_line())
    finish(report.document(), render(report), out, output)


def _lengths(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        prompt, new = map(int, parts)
        if prompt >= 1 and new >= 2:
            return prompt, new
    raise ConfigError(f"--lengths {text!r}: expected PROMPT:NEW, such as 32:96, NEW from 2")


def _answers(ctx: typer.Context, options: "AnswersOptions", out: Path | None) -> None:
    from crossdock.bench import balance_answers as bench
    from crossdock.bench.balance_table import render

    output = output_of(ctx)
    with output.stages() as on_progress:
        cases = bench.run_answers(options, on_progress)
    report = bench.report(options, cases, command_line())
    finish(report.document(), render(report), out, output)


def _live(ctx: typer.Context, options: "LiveOptions", out: Path | None) -> None:
    from crossdock.bench import balance_live as bench
    from crossdock.bench.case_table import render

    output = output_of(ctx)
    with output.stages() as on_progress:
        run = bench.run_live(options, on_progress)
    report = bench.report(run, command_line())
    finish(report.document(), render(report), out, output)
