"""How `bench balance` looks on a terminal: the policies under each other, a table a question."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.bench.case_table import target_of
from crossdock.bench.report import Case, Report

TITLES = {
    "eplb_planning": "EPLB, 58 layers x 256 experts to 288 slots on 32 ranks, ms",
    "eplb_planning_processor": "the same, processor time, ms",
    "small_fullest_rank": "small cases: load of the fullest rank, mean",
    "generator_imbalance": "UltraEP's generator, 256 experts, 2 redundant slots a rank: imbalance",
    "generator_replicas": "UltraEP's generator: replicas",
    "choice_imbalance": "choice of replicas in a step: imbalance",
    "reroute": "choosing copies by quota, without the exchange of counts, us",
    "reroute_planning": "of that the quotas of all ranks, us",
    "counts_exchange": "exchange of counts between these GPUs, us",
    "drift_imbalance": "planned on window i, scored on i + 1: imbalance",
    "sticky_improvement_over_eplb": "part of eplb's improvement that sticky reaches",
    "sticky_moves_over_eplb": "experts that sticky moves, over eplb's",
    "answers_imbalance": "methods that change answers: imbalance",
    "answers_log_likelihood": "methods that change answers: log-likelihood, nats a token",
}
EXTRA = (
    "before",
    "replicas",
    "moves",
    "imbalance",
    "ms_per_layer",
    "ms",
    "fastest_ms",
    "dropped",
    "change",
    "on_own_rank",
)


def render(report: Report) -> RenderableType:
    shown: list[RenderableType] = [Text(f"{report.command}\n{report.device}")]
    for name, title in TITLES.items():
        cases = [case for case in report.cases if case.name == name]
        if cases:
            shown += [Text(f"\n{title}", style="bold"), _table(cases)]
    return Group(*shown)


def _table(cases: Sequence[Case]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shape = [key for key in cases[0].shape if key not in ("layers", "experts")]
    extra = [key for key in EXTRA if key in cases[0].more]
    for key in shape:
        table.add_column(key)
    for key in (*extra, "figure", "target"):
        table.add_column(key.replace("_", " "), justify="right")
    for case in cases:
        row = [str(case.shape[key]) for key in shape]
        numbers = [_number(case.more.get(key)) for key in extra]
        table.add_row(*row, *numbers, _number(case.median), target_of(case))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
