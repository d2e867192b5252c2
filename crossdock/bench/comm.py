"""`bench comm`: an exchange (dispatch, combine, no experts between) of CPU ranks on one host."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdock.bench.child import Child
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.comm import SharedMemory, shm_bytes
from crossdock.core import ConfigError

TRANSPORTS = ("shm", "collective")
FLOAT32_BYTES = 4
WARMUP_EXCHANGES = 3


@dataclass(frozen=True)
class CommOptions:
    """`tokens`: of each rank, one case each. `target`: how many times faster shm is to be."""

    ranks: int = 4
    tokens: tuple[int, ...] = (1, 8, 64)
    hidden: int = 256
    experts: int = 32
    top_k: int = 4
    exchanges: int = 20
    repeats: int = 15
    target: float | None = None


@dataclass(frozen=True)
class CommRun:
    """`seconds[transport, tokens]`: of an exchange, one entry per turn, by the slowest rank."""

    options: CommOptions
    seconds: dict[tuple[str, int], list[float]]


def run_comm(
    options: CommOptions, on_progress: Callable[[str], None] = lambda what: None
) -> CommRun:
    """Both transports take turns, `exchanges` at a time.

    Raises:
        ConfigError: one rank, or ranks that do not divide the experts.
    """
    if options.ranks < 2 or options.experts % options.ranks:
        raise ConfigError(
            f"{options.ranks} ranks over {options.experts} experts: expected at least 2 ranks that "
            "divide them; change --ranks or --experts"
        )
    if not 1 <= options.top_k <= options.experts:
        raise ConfigError(f"--top-k {options.top_k}: expected 1 to {options.experts}")
    seconds: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        on_progress(f"starting {options.ranks} ranks")
        ranks = _start(options, stack)
        for tokens in options.tokens:
            for transport in TRANSPORTS:
                _exchange(ranks, transport, tokens, WARMUP_EXCHANGES)
                seconds[transport, tokens] = []
            for turn in range(options.repeats):
                for transport in TRANSPORTS:
                    on_progress(f"tokens {tokens}, {turn + 1} of {options.repeats}: {transport}")
                    took = _exchange(ranks, transport, tokens, options.exchanges)
                    seconds[transport, tokens].append(took)
    return CommRun(options, seconds)


def _start(options: CommOptions, stack: ExitStack) -> list[Child]:
    sizes = (options.ranks, max(options.tokens), options.hidden, options.top_k, FLOAT32_BYTES)
    memory = SharedMemory.create(shm_bytes(*sizes))
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="crossdock-"))
    ranks = [
        stack.enter_context(
            Child("crossdock.bench.comm_rank", f"rank {rank}", 1, pass_fds=(memory.fd,))
        )
        for rank in range(options.ranks)
    ]
    settings: dict[str, Any] = {
        "ranks": options.ranks,
        "fd": memory.fd,
        "rendezvous": str(Path(directory) / "store"),
        "max_tokens": max(options.tokens),
        "hidden": options.hidden,
        "experts": options.experts,
        "top_k": options.top_k,
        "transports": TRANSPORTS,
    }
    for rank, child in enumerate(ranks):
        child.send({**settings, "rank": rank})
    for child in ranks:
        child.receive()
    memory.close_fd()
    return ranks


def _exchange(ranks: list[Child], transport: str, tokens: int, exchanges: int) -> float:
    for child in ranks:
        child.send({"transport": transport, "tokens": tokens, "exchanges": exchanges})
    return float(max(child.receive()["seconds"] for child in ranks))


def report(run: CommRun, command: str) -> Report:
    cases = [case for tokens in run.options.tokens for case in _cases(run, tokens)]
    return Report(command, cpu_name(), tuple(cases), {"threads_per_rank": 1})


def _cases(run: CommRun, tokens: int) -> Iterator[Case]:
    options = run.options
    shape = {
        "ranks": options.ranks,
        "tokens": tokens,
        "hidden": options.hidden,
        "experts": options.experts,
        "top_k": options.top_k,
    }
    where = f"{options.ranks} ranks, {tokens} token" + "s" * (tokens > 1) + " each"
    cases = {
        kind: case_of(
            "exchange",
            [1e6 * s for s in run.seconds[kind, tokens]],
            "us",
            "lower",
            {"variant": f"{kind}, {where}", **shape},
        )
        for kind in TRANSPORTS
    }
    yield from cases.values()
    yield case_of(
        "collective_to_shm",
        [
            a / b
            for a, b in zip(
                run.seconds["collective", tokens], run.seconds["shm", tokens], strict=True
            )
        ],
        "x",
        "higher",
        {"variant": where, **shape},
        against={kind: case.median for kind, case in cases.items()},
        target=options.target,
    )
