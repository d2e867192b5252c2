"""`bench experts`: the experts' products alone, in every layout and by whoever can, on all GPUs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from crossdock.bench import figures
from crossdock.bench.ranks import Ranks
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.stats import percentile
from crossdock.core import ConfigError

OURS = "FP8, own kernel"
SEED = 1


@dataclass(frozen=True)
class Shape:
    """`slots` experts with `rows` rows each; layout "grouped" or "masked"."""

    layout: str
    slots: int
    rows: int

    def __str__(self) -> str:
        return f"{self.layout} {self.slots} x {self.rows}"


SHAPES = "grouped:32x1024,grouped:32x128,masked:128x64,masked:128x16"


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """A comma list of LAYOUT:SLOTSxROWS."""
    try:
        shapes = []
        for part in text.split(","):
            layout, _, numbers = part.partition(":")
            slots, rows = (int(n) for n in numbers.split("x"))
            if layout not in ("grouped", "masked") or min(slots, rows) < 1:
                raise ValueError
            shapes.append(Shape(layout, slots, rows))
    except ValueError:
        raise ConfigError(
            f"--shapes {text!r}: expected LAYOUT:SLOTSxROWS, several with commas, LAYOUT grouped "
            "or masked, such as grouped:32x1024"
        ) from None
    return tuple(shapes)


@dataclass(frozen=True)
class ExpertsOptions:
    """`width`: of a row; `out`: of what comes of it. `reps`: of each turn."""

    ranks: int
    device: str
    shapes: tuple[Shape, ...] = parse_shapes(SHAPES)
    width: int = 7168
    out: int = 4096
    reps: int = 10
    turns: int = 15


@dataclass(frozen=True)
class ExpertsRun:
    """`times[shape][who][kind]`: us, of all ranks. `clocks[shape][who]`: MHz under load, of each
    rank, where it could be read."""

    options: ExpertsOptions
    device: str
    times: dict[Shape, dict[str, dict[str, list[float]]]]
    clocks: dict[Shape, dict[str, list[float]]]


def run_experts(
    options: ExpertsOptions, on_progress: Callable[[str], None] = lambda what: None
) -> ExpertsRun:
    """
    Raises:
        ConfigError: widths that the kernels do not serve.
        CrossdockError: a product is wrong.
    """
    for flag, value in (("--width", options.width), ("--outputs", options.out)):
        if value % 128:
            raise ConfigError(f"{flag} {value}: expected a multiple of 128")
    times: dict[Shape, dict[str, dict[str, list[float]]]] = {}
    clocks: dict[Shape, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        on_progress(f"starting {options.ranks} ranks")
        ranks = Ranks("crossdock.bench.experts_rank", options.ranks, options.device, {}, stack)
        for shape in options.shapes:
            on_progress(f"{shape}: checking and timing")
            times[shape], clocks[shape] = _time(ranks, shape, options)
    name = ranks.facts[0]["device"]
    device = f"{options.ranks} x {name}" if name else f"{cpu_name()}, Triton's interpreter"
    return ExpertsRun(options, device, times, clocks)


def _time(
    ranks: Ranks, shape: Shape, options: ExpertsOptions
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    request = {
        "layout": shape.layout,
        "slots": shape.slots,
        "rows": shape.rows,
        "width": options.width,
        "out": options.out,
        "seed": SEED,
        "turns": options.turns,
        "reps": options.reps,
    }
    times: dict[str, dict[str, list[float]]] = {}
    clocks: dict[str, list[float]] = {}
    for answer in ranks.ask(request):
        for who, clock in answer["clocks"].items():
            clocks.setdefault(who, []).extend([] if clock is None else [clock])
        for who, kinds in answer["times"]:
            pooled = times.setdefault(who, {kind: [] for kind in kinds})
            for kind, values in kinds.items():
                pooled[kind] += values
    return times, clocks


METHOD = (
    "Each GPU does the products by itself, all at the same time. Median and quartiles over all of "
    "them of graph replays (of several repetitions, flushes of L2 subtracted). weights: bytes of "
    "weights over the time. clock_MHz: of each GPU's multiprocessors while the product is repeated "
    "without pause. Products were first compared with fp32, slot by slot."
)


def report(run: ExpertsRun, command: str) -> Report:
    cases = [case for shape in run.times for case in _cases(run, shape)]
    notes: dict[str, Any] = {"method": METHOD, "interpreter": run.options.device == "cpu"}
    return Report(command, run.device, tuple(cases), notes)


def _cases(run: ExpertsRun, shape: Shape) -> Iterator[Case]:
    """A product's arithmetic rate and the rate at which weights are read, each a case."""
    options = run.options
    flops = 2 * shape.slots * shape.rows * options.width * options.out
    asked = "H200" in run.device and (options.width, options.out) == (7168, 4096)
    for name, unit, amount_of in (
        ("arithmetic", "TFLOP/s", lambda who: flops),
        ("weights", "TB/s", lambda who: _weight_bytes(who, shape, options)),
    ):
        rates = {
            who: [amount_of(who) / us / 1e6 for us in kinds.get("graph") or kinds["eager"]]
            for who, kinds in run.times[shape].items()
        }
        for who, values in rates.items():
            mine = who == OURS
            others = {w: percentile(v, 50) for w, v in rates.items() if w != who}
            key = (name, shape.layout, shape.slots, shape.rows)
            kinds = run.times[shape][who]
            yield case_of(
                name,
                values,
                unit,
                "higher",
                {
                    "variant": f"{who}, {shape}",
                    "layout": shape.layout,
                    "slots": shape.slots,
                    "rows": shape.rows,
                    "width": options.width,
                    "out": options.out,
                },
                against=others if mine else {},
                target=figures.EXPERT_TARGETS.get(key) if asked and mine else None,
                more={
                    "us": percentile(kinds.get("graph") or kinds["eager"], 50),
                    "eager_us": percentile(kinds["eager"], 50),
                    "clock_MHz": run.clocks[shape].get(who, []),
                },
            )


def _weight_bytes(who: str, shape: Shape, options: ExpertsOptions) -> int:
    """Scales included."""
    count = shape.slots * options.width * options.out
    return count + count // 128**2 * 4 if who.startswith("FP8") else 2 * count
