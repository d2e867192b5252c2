"""`bench comm` over NVLink: our exchange beside NCCL and a plain copy over the link."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from crossdock.bench import figures
from crossdock.bench.comm_case import (
    COPY_BYTES,
    GATHER,
    LINK,
    OTHER_FORMS,
    OURS,
    PATTERNS,
    SCATTER,
    CommCase,
)
from crossdock.bench.ranks import Ranks
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.stats import percentile
from crossdock.core import ConfigError
from crossdock.core.staging import Staging

LOW_LATENCY = 128
"""Tokens that low-latency buffers are sized for, as a decode step's would be; in the interpreter
only as many as there are."""
BF16_BYTES = 2
SEED = 1


@dataclass(frozen=True)
class GpuCommOptions:
    """`tokens`: of each rank, cases each. `reps`: of each turn. `programs`: None as derived."""

    ranks: int
    device: str
    tokens: tuple[int, ...] = (1, 32, 128, 4096)
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    pattern: str = "uniform"
    programs: int | None = None
    reps: int = 10
    turns: int = 15


@dataclass(frozen=True)
class Timed:
    """`times`: us by (who, what) and kind, of all ranks. `link_rows`: on the busiest direction of
    a link, by dispatch and by combine."""

    case: CommCase
    times: dict[tuple[str, str], dict[str, list[float]]]
    link_rows: tuple[int, int]
    row_bytes: int
    programs: int


@dataclass(frozen=True)
class GpuCommRun:
    """`deep_ep`: its version, or why it did not run."""

    options: GpuCommOptions
    device: str
    deep_ep: str
    timed: tuple[Timed, ...]


def cases_of(options: GpuCommOptions) -> list[CommCase]:
    """BF16, FP8 and, for invariant mode, a row per (token, expert)."""
    o = options
    cases = []
    for tokens in o.tokens:
        most = max(tokens, LOW_LATENCY if o.device == "cuda" and tokens <= LOW_LATENCY else 0)
        shape = (o.ranks, tokens, most, o.hidden, o.experts, o.top_k)
        for fp8, per_expert in ((False, False), (True, False), (False, True)):
            cases.append(CommCase(*shape, fp8, per_expert, o.pattern))
    return cases


def run_comm(
    options: GpuCommOptions, on_progress: Callable[[str], None] = lambda what: None
) -> GpuCommRun:
    """
    Raises:
        ConfigError: sizes that do not fit each other.
        CrossdockError: rows or sums differ from the collective transport's.
    """
    _check(options)
    cases = cases_of(options)
    with ExitStack() as stack:
        on_progress(f"starting {options.ranks} ranks")
        most = max(_staging(case).nbytes for case in cases) if options.device == "cpu" else 0
        ranks = Ranks(
            "crossdock.bench.comm_nvlink_rank", options.ranks, options.device, {}, stack, most
        )
        timed = []
        for case in cases:
            on_progress(f"{describe(case)}: checking and timing")
            timed.append(_time(ranks, case, options))
    name = ranks.facts[0]["device"]
    device = f"{options.ranks} x {name}" if name else f"{cpu_name()}, Triton's interpreter"
    return GpuCommRun(options, device, ranks.facts[0]["deep_ep"], tuple(timed))


def _check(options: GpuCommOptions) -> None:
    slots = -(-options.experts // max(1, options.ranks))
    usable = slots if options.pattern == "one-rank" else options.experts
    if not 1 <= options.top_k <= usable:
        raise ConfigError(f"--top-k {options.top_k}: expected 1 to {usable} for these experts")
    if options.pattern not in PATTERNS:
        raise ConfigError(f"--pattern {options.pattern!r}: expected one of {', '.join(PATTERNS)}")
    if options.hidden % 128:
        raise ConfigError(f"--hidden {options.hidden}: expected a multiple of 128")


def _staging(case: CommCase) -> Staging:
    return Staging(
        case.ranks, case.max_tokens, case.hidden, case.top_k, BF16_BYTES, case.fp8, case.per_expert
    )


def _time(ranks: Ranks, case: CommCase, options: GpuCommOptions) -> Timed:
    request = {
        "case": asdict(case),
        "seed": SEED,
        "programs": options.programs,
        "turns": options.turns,
        "reps": options.reps,
    }
    answers = ranks.ask(request)
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for answer in answers:
        for who, what, kinds in answer["times"]:
            pooled = times.setdefault((who, what), {kind: [] for kind in kinds})
            for kind, values in kinds.items():
                pooled[kind] += values
    first = answers[0]
    return Timed(case, times, tuple(first["link_rows"]), first["row_bytes"], first["programs"])


def describe(case: CommCase) -> str:
    mode = "low latency" if _staging(case).low_latency else "normal"
    dtype = "FP8" if case.fp8 else "BF16"
    each = ", per expert" if case.per_expert else ""
    pattern = "" if case.pattern == "uniform" else f", {case.pattern}"
    return f"{mode} {dtype}{each}{pattern}, {case.tokens} token" + "s" * (case.tokens > 1)


def report(run: GpuCommRun, command: str) -> Report:
    cases = [case for timed in run.timed for case in _cases(run, timed)]
    copies = [_median(t.times[LINK, "copy"]) for t in run.timed if (LINK, "copy") in t.times]
    notes: dict[str, Any] = {
        "method": METHOD,
        "deep_ep": run.deep_ep,
        "interpreter": run.options.device == "cpu",
        "copy_GBps": COPY_BYTES / min(copies) / 1e3 if copies else None,
    }
    return Report(command, run.device, tuple(cases), notes)


METHOD = (
    "us; median and quartiles over all ranks of graph replays (of several repetitions, flushes and "
    "alignments subtracted), eager beside it: events around repetitions launched from Python. "
    "Before each repetition 256 MiB are written and the ranks aligned. wire: bytes of rows and "
    "scales on the busiest direction of a link, copy: 256 MiB pushed to the next rank by all at "
    "once. Rows and sums were first compared with the collective transport, exactly."
)


def _cases(run: GpuCommRun, timed: Timed) -> Iterator[Case]:
    copy_us = _median(timed.times.get((LINK, "copy"), {}))
    for (who, what), kinds in timed.times.items():
        wire = _wire_bytes(timed, who, what)
        key = (what, timed.case.tokens, "fp8" if timed.case.fp8 else "bf16")
        wanted = figures.asked(run.device, asdict(timed.case)) and who == OURS
        wanted = wanted and not timed.case.per_expert and timed.case.pattern == "uniform"
        values = kinds.get("graph") or kinds["eager"]
        against = _against(timed, what) if who == OURS else {}
        if wanted and timed.case.ranks == 2 and key in figures.COMM_STORED:
            against[figures.DEEP_EP] = figures.COMM_STORED[key]
        yield case_of(
            what,
            values,
            "us",
            "lower",
            {"variant": f"{who}, {describe(timed.case)}", **asdict(timed.case)},
            against=against,
            target=figures.comm_target(timed.case.ranks, key, wire) if wanted else None,
            more=_more(kinds, wire, percentile(values, 50), copy_us)
            | ({"programs": timed.programs} if who in (OURS, *OTHER_FORMS) else {}),
        )


def _more(
    kinds: dict[str, list[float]], wire: int | None, median: float, copy_us: float
) -> dict[str, Any]:
    eager = kinds["eager"]
    more: dict[str, Any] = {
        "timed": "graph" if kinds.get("graph") else "eager",
        "eager_us": percentile(eager, 50),
        "eager_quartiles": (percentile(eager, 25), percentile(eager, 75)),
    }
    if wire:
        rate = wire / median / 1e3
        more |= {"wire_bytes": wire, "wire_GBps": rate}
        more["share_of_copy"] = rate / (COPY_BYTES / copy_us / 1e3)
    return more


def _wire_bytes(timed: Timed, who: str, what: str) -> int | None:
    """None of a round trip, which has two directions after each other."""
    case, home = timed.case, timed.case.hidden * BF16_BYTES
    if who == LINK:
        return COPY_BYTES
    if who.endswith((GATHER, SCATTER)):
        return (case.ranks - 1) * case.tokens * home
    if what == "round_trip":
        return None
    if what.startswith("combine"):
        return timed.link_rows[1] * home
    return timed.link_rows[0] * timed.row_bytes


def _against(timed: Timed, what: str) -> dict[str, float]:
    phase = "dispatch" if what.startswith("dispatch") else "combine"

    def beside(who: str, of: str) -> bool:
        if who in (OURS, *OTHER_FORMS):
            return who != OURS and of == what
        return of == phase and what != "round_trip"

    return {
        who if kinds.get("graph") else f"{who}, eager": _median(kinds)
        for (who, of), kinds in timed.times.items()
        if beside(who, of)
    }


def _median(kinds: dict[str, list[float]]) -> float:
    return percentile(kinds.get("graph") or kinds.get("eager", []), 50)
