"""How far the cost model's predictions are from published and measured figures.

Rows are data (`recipes/validation/rows.toml`). Keys of each: `name`, `kind`, `source`, `published`,
`calibration` (its figure was used to fit `calibration.py`), `cause` (what is known to be missing or
odd, where something is). By kind:

- `prefill`, `decode`: `model`, `hardware`, `fabric`, `layout` (of `Layout`), `tokens` per GPU and
  step, `context`, `emitted` (output tokens per GPU and step; default `tokens`), `traffic` ("even":
  random routing, the default; "balanced": real, after EPLB; "unbalanced": real, without),
  `synchronous` (scheduling is not overlapped), `nvfp4_tflop_per_s` (where the hardware's file knows
  no such rate), `per_gpus`; predicted are tokens per second of `per_gpus` GPUs.
- `ratio`: the same, over the throughput of the row changed as `against` says; rankings likewise.
- `run`: `requests` per GPU of `isl` and `osl` in one batch, prompts first, 8,192 tokens a step;
  predicted are output tokens per second and GPU (prompt tokens where `osl` is 1).
- `dispatch`, `combine`: `gpus`, `mode`, `tokens`, `row_dtype`, `groups` [number, chosen]; us of the
  kernel alone.
- `product`: `slots` x `rows` of `dtype`, K = 7168 and N = 4096; us.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from crossdock.core import ConfigError, MoESpec
from crossdock.core.recipes import read_toml, recipes_dir
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.cost import (
    BYTES,
    StepModel,
    compute_rate,
    exchange_s,
    expected_imbalance,
    spread,
)
from crossdock.planner.cost.model import FP8, FP8_ROW
from crossdock.planner.cost.terms import Product
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import Hardware, load_hardware
from crossdock.planner.layout import Layout

Values = Mapping[str, Any]
RUN_TOKENS = 8192
HIDDEN, WIDTH = 7168, 4096
"""Of the rows of exchanges and products: DeepSeek-V3's hidden size, and twice its experts' F."""


@dataclass(frozen=True)
class Row:
    """`error`: predicted / published - 1. `cause`: what the row is known to lack, else empty."""

    name: str
    kind: str
    predicted: float
    published: float
    unit: str
    calibration: bool
    source: str
    cause: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "predicted": self.predicted,
            "published": self.published,
            "unit": self.unit,
            "error": self.error,
            "calibration": self.calibration,
            "source": self.source,
            "cause": self.cause,
        }


@dataclass(frozen=True)
class Ranking:
    """What a source found faster; `margin`: the predicted throughput of it over the other's."""

    name: str
    margin: float
    source: str

    @property
    def right(self) -> bool:
        return self.margin > 1.0


def validate(calibration: Calibration = DEFAULT) -> list[Row]:
    """Every row, predicted. Raises ConfigError where a row is not well formed."""
    data = _data()
    rows = []
    for row in data["row"]:
        predict, unit = _KINDS[row["kind"]]
        rows.append(
            Row(
                name=row["name"],
                kind=row["kind"],
                predicted=predict(row, calibration),
                published=float(row["published"]),
                unit=unit,
                calibration=row.get("calibration", False),
                source=data["sources"][row["source"]],
                cause=row.get("cause", ""),
            )
        )
    return rows


def rankings(calibration: Calibration = DEFAULT) -> list[Ranking]:
    """Whether the model orders layouts as their sources do."""
    data = _data()
    return [
        Ranking(row["name"], _ratio(row, calibration), data["sources"][row["source"]])
        for row in data["ranking"]
    ]


@cache
def median_error(kind: str | None = None) -> float:
    """Median absolute error of the held-out rows of `kind` ("prefill", "decode" ...; None: all)."""
    errors = [
        abs(row.error)
        for row in validate()
        if not row.calibration and (kind is None or row.kind == kind)
    ]
    if not errors:
        raise ConfigError(f"no held-out row of kind {kind!r}; known: {', '.join(_KINDS)}")
    return median(errors)


def weaknesses() -> tuple[str, ...]:
    """Where the model is weak, in words."""
    return tuple(_data()["weak"])


def document() -> dict[str, Any]:
    """All of it for `plan --validate --json`: `rows`, `rankings`, median absolute errors of the
    held-out rows by kind, the calibration and where the model is weak."""
    rows = validate()
    kinds = sorted({row.kind for row in rows})
    return {
        "rows": [row.document() for row in rows],
        "rankings": [{**asdict(ranking), "right": ranking.right} for ranking in rankings()],
        "median_absolute_error": {
            "all": median_error(),
            **{kind: median_error(kind) for kind in kinds},
        },
        "calibration_share": sum(row.calibration for row in rows) / len(rows),
        "calibration": asdict(DEFAULT),
        "weak": list(weaknesses()),
    }


@cache
def _data() -> dict[str, Any]:
    path = recipes_dir() / "validation" / "rows.toml"
    data = read_toml(path)
    for row in data["row"]:
        if row.get("kind") not in _KINDS:
            raise ConfigError(
                f"{path}: {row.get('name')!r}: kind {row.get('kind')!r}; expected one of "
                f"{', '.join(_KINDS)}"
            )
    for row in data["row"] + data["ranking"]:
        if row.get("source") not in data["sources"]:
            raise ConfigError(f"{path}: {row['name']!r}: source {row.get('source')!r}: not listed")
    return data


@cache
def _hardware(name: str, fabric: str | None, nvfp4: float | None) -> Hardware:
    hardware = load_hardware(name, fabric)
    if nvfp4 is not None:
        hardware = replace(hardware, flops={**hardware.flops, "nvfp4": nvfp4 * 1e12})
    return hardware


@cache
def _model(name: str) -> Any:
    return load_model(name)


def _model_of(row: Values, phase: Any, calibration: Calibration) -> StepModel:
    hardware = _hardware(row["hardware"], row.get("fabric"), row.get("nvfp4_tflop_per_s"))
    layout = Layout(**row["layout"])
    return StepModel(_model(row["model"]), hardware, layout, phase, calibration)


def _throughput(row: Values, calibration: Calibration) -> float:
    role = row["layout"]["role"]
    model = _model_of(row, role, calibration)
    imbalance = _imbalance(row.get("traffic", "even"), model, calibration)
    seconds = model.seconds(row["tokens"], row["context"], imbalance)
    if row.get("synchronous"):
        seconds += calibration.synchronous_s
    return row.get("per_gpus", 1) * row.get("emitted", row["tokens"]) / seconds


def _imbalance(traffic: str, model: StepModel, calibration: Calibration) -> float:
    if traffic == "even" or not model.ep:
        return 1.0
    if traffic == "balanced":
        return calibration.real_traffic_imbalance
    return _unbalanced(model.spec.moe, model.layout.gpus, calibration.real_traffic_zipf)


@cache
def _unbalanced(moe: MoESpec, ranks: int, zipf: float) -> float:
    return expected_imbalance(moe, ranks, zipf=zipf)


def _ratio(row: Values, calibration: Calibration) -> float:
    changes = dict(row["against"])
    layout = {**row["layout"], **changes.pop("layout", {})}
    return _throughput(row, calibration) / _throughput(
        {**row, **changes, "layout": layout}, calibration
    )


def _run(row: Values, calibration: Calibration) -> float:
    requests, isl, osl = row["requests"], row["isl"], row["osl"]
    prefill = _model_of(row, "prefill", calibration)
    steps = requests * isl / RUN_TOKENS
    seconds = steps * prefill.seconds(RUN_TOKENS, isl / 2)
    if osl == 1:
        return requests * isl / seconds
    decode = _model_of(row, "decode", calibration)
    seconds += (osl - 1) * decode.seconds(requests, isl + osl / 2)
    return requests * osl / seconds


def _exchange_us(row: Values, calibration: Calibration) -> float:
    hardware = _hardware(row["hardware"], row.get("fabric"), None)
    groups, chosen = row.get("groups", (1, 1))
    moe = MoESpec(256, 8, WIDTH // 2, num_groups=groups, topk_groups=chosen)
    rows = spread(moe, row["gpus"], hardware.domain_size, row["mode"], redundant=False)
    dtype = row["row_dtype"]
    width = FP8_ROW if dtype == FP8 else BYTES[dtype]
    seconds = exchange_s(rows, hardware, row["mode"], HIDDEN * width, row["tokens"], calibration)
    return seconds * 1e6


def _product_us(row: Values, calibration: Calibration) -> float:
    hardware = _hardware(row["hardware"], None, None)
    dtype, slots, rows = row["dtype"], row["slots"], row["rows"]
    product = Product(
        "product",
        1,
        2.0 * HIDDEN * WIDTH,
        slots * HIDDEN * WIDTH * BYTES[dtype],
        HIDDEN * BYTES[dtype] + 2.0 * WIDTH,
        compute_rate(hardware, dtype),
        hardware.memory_bytes_per_s,
        calibration.roofline_power,
    )
    tile = calibration.expert_tile
    return product.seconds(slots * rows, slots * max(tile, rows)) * 1e6


_KINDS: dict[str, tuple[Callable[[Values, Calibration], float], str]] = {
    "prefill": (_throughput, "tokens/s"),
    "decode": (_throughput, "tokens/s"),
    "ratio": (_ratio, "times"),
    "run": (_run, "tokens/s"),
    "dispatch": (_exchange_us, "us"),
    "combine": (_exchange_us, "us"),
    "product": (_product_us, "us"),
}
