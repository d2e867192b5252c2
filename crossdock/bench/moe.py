"""`bench moe`: a whole MoE layer, router to combine, on all GPUs: times, and where they go."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from crossdock.bench import figures
from crossdock.bench.comm_case import COPY_BYTES
from crossdock.bench.moe_parts import COMBINE, DISPATCH, GEMM1, GEMM2
from crossdock.bench.ranks import Ranks
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.stats import percentile
from crossdock.core import ConfigError, MoESpec

SEED = 1
NAMES = {"deepgemm": "FP8, DeepGEMM", "triton": "FP8, own kernels", "bf16": "BF16"}
V3 = MoESpec(
    256,
    8,
    2048,
    scoring="sigmoid",
    num_groups=8,
    topk_groups=4,
    correction_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
"""DeepSeek-V3's, without its shared expert."""


@dataclass(frozen=True)
class MoEOptions:
    """`tokens`: of each rank, cases each. `reps`: of each turn."""

    ranks: int
    device: str
    tokens: tuple[int, ...] = (128, 4096)
    hidden: int = 7168
    spec: MoESpec = V3
    reps: int = 5
    turns: int = 15


@dataclass(frozen=True)
class Layer:
    """Of one number of tokens and dtype. `times[library][kind]`: us, of all ranks.
    `parts[library]`: mean us by part, a dict for each rank; `kernels[library]`: by kernel, of rank
    0. `rows`: (row, expert) pairs of each rank. `rows_RR`: from rank to rank."""

    tokens: int
    fp8: bool
    times: dict[str, dict[str, list[float]]]
    parts: dict[str, list[dict[str, float]]]
    kernels: dict[str, dict[str, float]]
    rows: list[int]
    rows_RR: np.ndarray
    weight_bytes: int


@dataclass(frozen=True)
class MoERun:
    options: MoEOptions
    device: str
    layers: tuple[Layer, ...] = field(default_factory=tuple)


def run_moe(options: MoEOptions, on_progress: Callable[[str], None] = lambda what: None) -> MoERun:
    """
    Raises:
        ConfigError: sizes that the layer does not serve.
        CrossdockError: its result is wrong.
    """
    spec = options.spec
    for what, value in (("--hidden", options.hidden), ("--width", spec.intermediate_size)):
        if value % 128:
            raise ConfigError(f"{what} {value}: expected a multiple of 128")
    # A group's score is the sum of its two best experts.
    if spec.num_experts % options.ranks or spec.num_experts % (2 * spec.num_groups):
        raise ConfigError(
            f"--experts {spec.num_experts}: expected a multiple of {options.ranks} ranks and of "
            f"{2 * spec.num_groups}, two in each of {spec.num_groups} groups"
        )
    layers = []
    with ExitStack() as stack:
        on_progress(f"starting {options.ranks} ranks")
        ranks = Ranks(
            "crossdock.bench.moe_rank",
            options.ranks,
            options.device,
            {},
            stack,
            _symmetric_bytes(options) if options.device == "cpu" else 0,
        )
        for tokens in options.tokens:
            for fp8 in (True, False):
                dtype = "FP8" if fp8 else "BF16"
                on_progress(f"{tokens} tokens, {dtype}: checking and timing")
                layers.append(_time(ranks, options, tokens, fp8))
    name = ranks.facts[0]["device"]
    device = f"{options.ranks} x {name}" if name else f"{cpu_name()}, Triton's interpreter"
    return MoERun(options, device, tuple(layers))


def _symmetric_bytes(options: MoEOptions) -> int:
    from crossdock.comm.nvlink import nvlink_bytes

    most, top_k = max(options.tokens), options.spec.top_k
    return 2 * nvlink_bytes(options.ranks, most, options.hidden, top_k)


def _time(ranks: Ranks, options: MoEOptions, tokens: int, fp8: bool) -> Layer:
    deep = options.device == "cuda" and importlib.util.find_spec("deep_gemm") is not None
    libraries = (["deepgemm"] * deep + ["triton"]) if fp8 else ["bf16"]
    request = {
        "tokens": tokens,
        "hidden": options.hidden,
        "spec": asdict(options.spec),
        "fp8": fp8,
        "libraries": libraries,
        "seed": SEED,
        "turns": options.turns,
        "reps": options.reps,
    }
    answers = ranks.ask(request)
    times: dict[str, dict[str, list[float]]] = {}
    for answer in answers:
        for library, kinds in answer["times"].items():
            pooled = times.setdefault(library, {kind: [] for kind in kinds})
            for kind, values in kinds.items():
                pooled[kind] += values
    seen = {lib: [a["parts"][lib] for a in answers if a["parts"].get(lib)] for lib in libraries}
    parts = {lib: [each["parts"] for each in of] for lib, of in seen.items()}
    kernels = {lib: of[0]["kernels"] for lib, of in seen.items() if of}
    rows_RR = np.array([answer["rows_out"] for answer in answers])
    rows = [answer["rows"] for answer in answers]
    weight_bytes = answers[0]["weight_bytes"]
    return Layer(tokens, fp8, times, parts, kernels, rows, rows_RR, weight_bytes)


METHOD = (
    "us; median and quartiles over all ranks of graph replays (of several repetitions, flushes of "
    "L2 and alignments subtracted), eager beside it. parts_ms: kernels as the profiler saw them in "
    "such a replay, mean over ranks; a kernel that waits for another rank counts as dispatch or "
    "combine. weights: reading a rank's once at 4.3 TB/s. The result was first compared with fp32 "
    "products and the collective transport."
)


def report(run: MoERun, command: str) -> Report:
    cases = [
        case
        for layer in run.layers
        for library in layer.times
        if library != "copy"
        for case in _cases(run, layer, library)
    ]
    notes: dict[str, Any] = {"method": METHOD, "interpreter": run.options.device == "cpu"}
    return Report(command, run.device, tuple(cases), notes)


def _cases(run: MoERun, layer: Layer, library: str) -> Iterator[Case]:
    options, spec = run.options, run.options.spec
    shape = {
        "variant": f"{NAMES[library]}, {layer.tokens} tokens",
        "ranks": options.ranks,
        "tokens": layer.tokens,
        "hidden": options.hidden,
        "experts": spec.num_experts,
        "top_k": spec.top_k,
        "width": spec.intermediate_size,
    }
    sizes = (options.ranks, spec.intermediate_size)
    asked = figures.asked(run.device, shape) and sizes == (2, 2048)
    kinds = layer.times[library]
    values = kinds.get("graph") or kinds["eager"]
    flops = 6 * max(layer.rows) * options.hidden * spec.intermediate_size
    median = percentile(values, 50)
    parts = layer.parts.get(library, [])
    weights_us = layer.weight_bytes / figures.WEIGHTS_BPS * 1e6
    others = {
        NAMES[other]: percentile(k.get("graph") or k["eager"], 50)
        for other, k in layer.times.items()
        if other not in (library, "copy")
    }
    more = {
        "eager_us": percentile(kinds["eager"], 50),
        "TFLOPs": flops / median / 1e6,
        "weights_us": weights_us,
        "rows": layer.rows,
        **({"parts_ms": _mean_ms(parts)} if parts else {}),
        "kernels_us": layer.kernels.get(library, {}),
    }
    yield case_of("moe_layer", values, "us", "lower", shape, against=others, more=more)
    yield case_of(
        "over_reading_weights",
        [value / weights_us for value in values],
        "x",
        "lower",
        shape,
        target=figures.MOE_TARGETS.get(("weights", layer.tokens, library)) if asked else None,
    )
    target = figures.MOE_TARGETS.get(("rest", layer.tokens, "fp8" * layer.fp8))
    for name, shares in _rest(layer, library, options.hidden).items():
        yield case_of(name, shares, "%", "lower", shape, target=target if asked else None)


def _rest(layer: Layer, library: str, hidden: int) -> dict[str, list[float]]:
    """Share of the time that is neither products nor wire, by rank: the wire as the time of the
    exchange's kernels, and as no more than its bytes at the speed of a copy."""
    kinds = layer.times[library]
    total = percentile(kinds.get("graph") or kinds["eager"], 50)
    copy = layer.times.get("copy", {}).get("graph")
    if not layer.parts.get(library) or not copy:
        return {}
    rows_RR = layer.rows_RR.copy()
    np.fill_diagonal(rows_RR, 0)
    busiest = int(max(rows_RR.sum(0).max(), rows_RR.sum(1).max()))
    there = hidden + hidden // 128 * 4 if layer.fp8 else 2 * hidden
    floor = busiest * (there + 2 * hidden) / COPY_BYTES * percentile(copy, 50)
    kernels, bytes_alone = [], []
    for parts in layer.parts[library]:
        gemm = parts[GEMM1] + parts[GEMM2]
        kernels.append(100 * (1 - (gemm + parts[DISPATCH] + parts[COMBINE]) / total))
        bytes_alone.append(100 * (1 - (gemm + floor) / total))
    return {
        "neither_gemm_nor_wire": kernels,
        "neither_gemm_nor_wire_at_copy_speed": bytes_alone,
    }


def _mean_ms(parts: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(p[key] for p in parts) / len(parts) / 1e3 for key in parts[0]}
