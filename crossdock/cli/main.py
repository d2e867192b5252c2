"""The command line: which commands there are, and what becomes of their errors."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from crossdock import __version__
from crossdock.cli import (
    balance,
    bench,
    bench_balance,
    bench_engine,
    bench_quant,
    bench_soak,
    bench_steps,
    bench_suite,
    check,
    generate,
    plan,
    serve,
)
from crossdock.cli.output import Output, open_output
from crossdock.core import ConfigError, CrossdockError
from crossdock.core.env import read_env

LEVELS = ("debug", "info", "warning", "error")
MOST = 10**9
"""Of any flag's number: clocks that wait end at 9.2e9 seconds."""
_ANY = ("seed", "request_rate")
"""Have limits of their own."""


class _Command(TyperCommand):
    """Refuses numbers that no flag means; what a flag takes within those, its command checks."""

    def invoke(self, ctx: Any) -> Any:
        for param in self.params:
            value = ctx.params.get(param.name)
            if isinstance(value, int | float) and not abs(value) <= MOST and param.name not in _ANY:
                raise ConfigError(f"{param.opts[0]} must be a number up to {MOST:,}, got {value}")
        return super().invoke(ctx)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"crossdock {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="crossdock",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain help: it pipes, and brackets in it are no markup
        pretty_exceptions_enable=False,
    )
    app.command("serve")(serve.serve)
    app.command("generate")(generate.generate)
    app.command("check")(check.check)
    app.command("plan")(plan.plan)
    app.command("balance")(balance.balance)
    app.callback()(_version_flag)
    benches = typer.Typer(
        help="Benchmarks; tables, and one JSON document with --json or --out FILE.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.add_typer(benches, name="bench")
    benches.command("engine")(bench_engine.engine)
    benches.command("serve")(bench.serve)
    benches.command("comm")(bench.comm)
    benches.command("attention")(bench.attention)
    benches.command("experts")(bench.experts)
    benches.command("moe")(bench.moe)
    benches.command("balance")(bench_balance.balance)
    benches.command("quant")(bench_quant.quant)
    benches.command("soak")(bench_soak.soak)
    benches.command("startup")(bench.startup)
    benches.command("steps")(bench_steps.steps)
    benches.command("suite")(bench_suite.suite)
    benches.command("plan")(bench.plan)
    for command in (*app.registered_commands, *benches.registered_commands):
        command.cls = _Command
    return app


def _version_flag(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Expert-parallel inference for mixture-of-experts language models."""


def run(argv: Sequence[str]) -> int:
    """The exit code of a command line: 0 done, 2 the user's mistake, 1 anything else."""
    output = open_output(argv)
    try:
        _set_up_logging()
        code = build_app()(list(argv), prog_name="crossdock", standalone_mode=False, obj=output)
        output.stdout.flush()
        return code if isinstance(code, int) and code in (0, 1, 2) else int(bool(code))
    except BrokenPipeError:  # `crossdock ... | head`: nobody listens any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _explain(error, output)


def _explain(error: Exception, output: Output) -> int:
    """Says what went wrong, without a traceback unless the log level is debug."""
    if isinstance(error, CrossdockError):
        message, code = str(error), error.exit_code
    elif hasattr(error, "format_message"):  # typer's usage errors
        message, code = error.format_message(), 2
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
            print(message, file=sys.stderr)
            return code
        if context := getattr(error, "ctx", None):
            message += f" (see {context.command_path} --help)"
    else:
        message, code = f"{type(error).__name__}: {error}", 1
        if read_env().log_level != "debug":
            message += " (CROSSDOCK_LOG_LEVEL=debug shows where)"
    if read_env().log_level == "debug":
        traceback.print_exception(error)
    output.error(message, code)
    return code


def _set_up_logging() -> None:
    level = read_env().log_level
    if level not in LEVELS:
        raise ConfigError(f"CROSSDOCK_LOG_LEVEL={level!r}: expected one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("crossdock").setLevel(level.upper())
