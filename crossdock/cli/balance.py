"""`balance`: recorded expert loads to a placement, and what it would gain."""

import time
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.cli.output import JsonFlag, output_of
from crossdock.core import ConfigError, load_spec

if TYPE_CHECKING:
    import numpy as np

    from crossdock.balance import Answer, Loads, Problem

MOST_ROWS = 20
"""Layers in the table; of more, the worst balanced."""
MOST_SLOTS = 640
"""Slots of all layers up to which a terminal is shown the placement."""


def balance(
    ctx: typer.Context,
    loads: Annotated[
        Path | None,
        typer.Argument(
            metavar="LOADS",
            help="Recorded loads: JSON, or SGLang's .pt. See docs/balancing.md.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Expert-parallel ranks.")] = None,
    redundant: Annotated[
        int | None,
        typer.Option(help="Slots beyond one per expert. [default: as few as the ranks need]"),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="eplb, quota, llep, lp, sticky, or optimal for small cases.")
    ] = "eplb",
    nodes: Annotated[int, typer.Option(help="Hosts of these ranks, for eplb.")] = 1,
    groups: Annotated[int, typer.Option(help="Expert groups of the router, for eplb.")] = 1,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of the model: says how many bytes an expert has."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw rank loads before and after: .png or .svg."),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Record the loads of a running server instead of LOADS."),
    ] = None,
    windows: Annotated[int, typer.Option(help="To record.")] = 1,
    seconds: Annotated[float, typer.Option(help="Of each window.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write what was recorded here.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plans which rank holds which experts, from recorded loads; or records some."""
    from crossdock.cli.balance_plot import check_plot, draw

    if plot is not None:
        check_plot(plot)
    if (loads is None) == (record is None):
        raise ConfigError("give either LOADS or --record URL")
    if ranks is None and record is None:
        raise ConfigError("--ranks is missing: over how many ranks to place the experts")
    recorded = _record(ctx, record, windows, seconds, out) if loads is None else _read(loads)
    if ranks is None:
        _say_recorded(ctx, recorded, out)
        return
    nbytes = recorded.expert_bytes if model is None else _expert_bytes(model)
    problem = _problem(recorded, ranks, redundant, nodes, groups, nbytes)
    start = time.perf_counter()
    answer = _policy(policy)(problem)
    took = time.perf_counter() - start
    plan = _document(recorded, problem, answer, policy, took, nbytes)
    output = output_of(ctx)
    if plot is not None:
        before, after = _rank_loads(recorded, problem, answer)
        draw(before, after, f"{policy}, {ranks} ranks", plot)
        output.notes.print(f"written: {plot}", markup=False)
    output.result(plan, _human(plan))


def _record(
    ctx: typer.Context, url: str | None, windows: int, seconds: float, out: Path | None
) -> "Loads":
    from crossdock.balance import parse_loads
    from crossdock.bench.report import write_document
    from crossdock.cli.balance_record import record

    assert url is not None
    output = output_of(ctx)
    with output.stages() as stage:
        document = record(url, windows, seconds, stage)
    if out is not None:
        write_document(document, out)
        output.notes.print(f"written: {out}", markup=False)
    return parse_loads(document, url)


def _say_recorded(ctx: typer.Context, recorded: "Loads", out: Path | None) -> None:
    windows, layers, experts = recorded.load_WLE.shape
    steps, document = int(recorded.steps_W.sum()), recorded.document()
    text = f"{windows} windows of {layers} layers x {experts} experts, {steps} steps"
    output_of(ctx).result(document, Text(text if out else dumps(document)))


def _policy(name: str) -> Any:
    from crossdock.balance import POLICIES

    if name not in POLICIES:
        raise ConfigError(f"--policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _read(path: Path) -> "Loads":
    from crossdock.balance import parse_loads, read_loads

    if path.suffix != ".pt":
        return read_loads(path)
    import pickle
    import zipfile

    import torch

    unsafe = ConfigError(f"{path}: not a file of tensors that torch can load safely")
    if path.exists() and not zipfile.is_zipfile(path):
        raise unsafe
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError):
        raise unsafe from None
    try:
        return parse_loads(_without_tensors(document), str(path))
    except (TypeError, RuntimeError) as error:  # sparse ones, and whatever else numpy has not
        raise ConfigError(f"{path}: expected dense tensors of numbers: {error}") from None


def _without_tensors(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, dict):
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return [_without_tensors(entry) for entry in value] if isinstance(value, list) else value


def _expert_bytes(model: Path) -> int:
    """In the checkpoint's own type."""
    from crossdock.planner.memory import matrix_bytes

    spec = load_spec(model)
    dtype = spec.dtype if spec.quant is None else "float8_e4m3fn"
    return matrix_bytes(spec, spec.expert_params, dtype)


def _problem(
    recorded: "Loads",
    ranks: int,
    redundant: int | None,
    nodes: int,
    groups: int,
    nbytes: int | None,
) -> "Problem":
    from crossdock.balance import Problem, slots_per_rank

    for flag, value in (("--ranks", ranks), ("--nodes", nodes), ("--groups", groups)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    if redundant is not None and redundant < 0:
        raise ConfigError(f"--redundant must be at least 0, got {redundant}")
    per_rank = slots_per_rank(recorded.load_WLE.shape[2], ranks, redundant)
    current_LP = recorded.placement_LP
    if current_LP is not None and current_LP.shape[1] != ranks * per_rank:
        # An engine changes its slots by a restart alone, and then starts linear.
        current_LP = None
    return Problem(recorded.total_LE(), ranks, per_rank, nodes, groups, current_LP, nbytes or 1)


def _start(problem: "Problem") -> "np.ndarray":
    """What the plan moves from: the placement recorded, else the one an engine starts with."""
    from crossdock.balance import linear_placement

    if problem.current_LP is not None:
        return problem.current_LP
    num_layers, num_experts = problem.load_LE.shape
    redundant = problem.num_ranks * problem.slots_per_rank - num_experts
    return linear_placement(num_layers, num_experts, problem.num_ranks, redundant).slot_expert_LP


def _before(recorded: "Loads", problem: "Problem") -> tuple[str, "np.ndarray"]:
    """The placement recorded, whatever its slots, if these ranks can share them evenly."""
    served_LP = recorded.placement_LP
    if served_LP is None or served_LP.shape[1] % problem.num_ranks:
        return "linear", _start(problem)
    return "recorded", served_LP


def _rank_loads(
    recorded: "Loads", problem: "Problem", answer: "Answer"
) -> tuple["np.ndarray", "np.ndarray"]:
    """`load_LR` before and after."""
    from crossdock.balance import Answer, rank_load

    load_LE = recorded.total_LE()
    return (
        rank_load(load_LE, Answer(_before(recorded, problem)[1]), problem.num_ranks),
        rank_load(load_LE, answer, problem.num_ranks),
    )


def _document(
    recorded: "Loads",
    problem: "Problem",
    answer: "Answer",
    policy: str,
    seconds: float,
    nbytes: int | None,
) -> dict[str, Any]:
    from crossdock.balance import imbalance_of, moved_experts

    before_LR, after_LR = _rank_loads(recorded, problem, answer)
    moves_L = moved_experts(_start(problem), answer.slot_expert_LP, problem.num_ranks)
    num_layers, num_experts = problem.load_LE.shape
    replicas_L = (answer.slot_expert_LP >= 0).sum(axis=1) - num_experts
    moves = int(moves_L.sum())
    served_LP = recorded.placement_LP
    return {
        "policy": policy,
        "windows": len(recorded.load_WLE),
        "steps": int(recorded.steps_W.sum()),
        "layers": num_layers,
        "experts": num_experts,
        "ranks": problem.num_ranks,
        "slots_per_rank": problem.slots_per_rank,
        "nodes": problem.num_nodes,
        "groups": problem.num_groups,
        "recorded_slots": None if served_LP is None else served_LP.shape[1],
        "before_placement": _before(recorded, problem)[0],
        "start_placement": "linear" if problem.current_LP is None else "recorded",
        "seconds": seconds,
        "imbalance_before": imbalance_of(before_LR).tolist(),
        "imbalance_after": imbalance_of(after_LR).tolist(),
        "replicas": int(replicas_L.sum()),
        "moves": moves,
        "bytes": None if nbytes is None else moves * nbytes,
        "replicas_by_layer": replicas_L.tolist(),
        "moves_by_layer": moves_L.tolist(),
        "placement": answer.slot_expert_LP.tolist(),
        "shares": None if answer.share_LP is None else answer.share_LP.tolist(),
    }


def _human(plan: dict[str, Any]) -> RenderableType:
    before, after = plan["imbalance_before"], plan["imbalance_after"]
    layers = plan["layers"]
    shown = sorted(sorted(range(layers), key=lambda i: -before[i])[:MOST_ROWS])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("layer", "before", "after", "replicas", "moves"):
        table.add_column(column, justify="right")
    for i in shown:
        table.add_row(
            str(i),
            f"{before[i]:.3f}",
            f"{after[i]:.3f}",
            str(plan["replicas_by_layer"][i]),
            str(plan["moves_by_layer"][i]),
        )
    table.add_row(
        "mean",
        f"{sum(before) / layers:.3f}",
        f"{sum(after) / layers:.3f}",
        f"{plan['replicas'] / layers:.1f}",
        f"{plan['moves'] / layers:.1f}",
        style="bold",
    )
    head = (
        f"{plan['policy']}: {layers} layers x {plan['experts']} experts on {plan['ranks']} ranks "
        f"x {plan['slots_per_rank']} slots, planned in {plan['seconds'] * 1e3:.1f} ms\n"
        f"{_placements(plan)}\n"
        "imbalance: load of the fullest rank over the mean, 1 is ideal"
    )
    if len(shown) < layers:
        head += f"; the {len(shown)} layers that were worst of {layers}"
    nbytes = plan["bytes"]
    size = "--model tells the bytes" if nbytes is None else f"{nbytes / 2**20:,.1f} MiB"
    moved = f"\nto move: {plan['moves']} experts to ranks that do not hold them, {size}"
    return Group(Text(head + "\n"), table, Text(moved), *_placement(plan))


def _placements(plan: dict[str, Any]) -> str:
    """Which ones the figures compare with."""
    ranks, served, before = plan["ranks"], plan["recorded_slots"], plan["before_placement"]
    slots = ranks * plan["slots_per_rank"]
    if served is None or served == slots:
        return f"before and moves: of the {before} placement"
    what = "before and moves: of the linear one"
    if before == "recorded":
        what = f"before is of this one over {ranks} ranks, moves are from the linear one"
    return f"the recorded placement has {served} slots, not {slots}: {what}"


def _placement(plan: dict[str, Any]) -> list[RenderableType]:
    """A line per layer, the ranks' experts between bars."""
    rows, slots = plan["placement"], plan["slots_per_rank"]
    if len(rows) * len(rows[0]) > MOST_SLOTS:
        return [Text("placement: too large to show, --json has it")]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("experts of rank 0 | rank 1 | ...", overflow="fold")
    for layer, row in enumerate(rows):
        ranks = [row[i : i + slots] for i in range(0, len(row), slots)]
        parts = [" ".join("-" if e < 0 else str(e) for e in experts) for experts in ranks]
        table.add_row(str(layer), " | ".join(parts))
    return [Text(""), table]
