"""`bench balance`: flags to options; the work is in the room `bench`."""

from typing import Annotated

import typer

from crossdock.cli.bench import OutFile, command_line, finish
from crossdock.cli.output import JsonFlag, output_of
from crossdock.core import ConfigError


def balance(
    ctx: typer.Context,
    ranks: Annotated[str, typer.Option(help="Of made loads; each must divide 256.")] = "32,64",
    seeds: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Of each rank, in made loads.")] = 2048,
    windows: Annotated[int, typer.Option(min=1, help="Plans on loads that drift.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Plans that are timed.")] = 30,
    model: Annotated[
        str | None,
        typer.Option(help="Record this model's routing and plan for it too. [default: made loads]"),
    ] = None,
    out: OutFile = None,
    json: JsonFlag = False,
) -> None:
    """The planners side by side: balance, replicas, moves and planning time."""
    from crossdock.bench import balance as bench
    from crossdock.bench.balance_table import render
    from crossdock.bench.report import parse_counts

    counts = parse_counts(ranks, "--ranks")
    for count in counts:
        if bench.EXPERTS % count:
            raise ConfigError(f"--ranks {count}: expected a divisor of {bench.EXPERTS}")
    options = bench.BalanceOptions(
        ranks=counts, seeds=seeds, tokens=tokens, windows=windows, repeats=repeats, model=model
    )
    output = output_of(ctx)
    with output.stages() as on_progress:
        cases = bench.run_balance(options, on_progress)
    report = bench.report(options, cases, command_line())
    finish(report.document(), render(report), out, output)
