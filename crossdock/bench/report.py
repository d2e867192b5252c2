"""The document every benchmark ends in, and how a terminal shows it."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from crossdock.bench.stats import percentile
from crossdock.core import ConfigError


@dataclass(frozen=True)
class Case:
    """One figure. `against`: medians of what ran beside it, by name; `target` is for `median`."""

    name: str
    shape: dict[str, Any]
    unit: str
    better: Literal["lower", "higher"]
    median: float
    quartiles: tuple[float, float]
    n: int
    against: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        if self.target is None or math.isnan(self.median):
            return None
        return self.median <= self.target if self.better == "lower" else self.median >= self.target


def case_of(
    name: str,
    values: Sequence[float],
    unit: str,
    better: Literal["lower", "higher"],
    shape: dict[str, Any],
    **rest: Any,
) -> Case:
    """A case of measured values; `rest`: against, target, more."""
    middle, low, high = (percentile(values, q) for q in (50, 25, 75))
    return Case(name, shape, unit, better, middle, (low, high), len(values), **rest)


@dataclass(frozen=True)
class Report:
    """`notes`: whatever else belongs to the run, by name."""

    command: str
    device: str
    cases: tuple[Case, ...]
    notes: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device,
            "versions": versions(),
            "cases": [_document_of(case) for case in self.cases],
            **self.notes,
        }


def write_document(document: dict[str, Any], path: Path, flag: str = "--out") -> None:
    """`flag`: what named the file. Raises ConfigError where it cannot be written."""
    check_writable(path, flag)
    path.write_text(json.dumps(document, indent=1) + "\n")


def check_writable(path: Path, flag: str = "--out") -> None:
    """Makes the folder; leaves no file that was not there. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from None


_DECIDING = (
    "crossdock", "torch", "triton", "transformers", "numpy", "flashinfer-python", "sgl-deep-gemm",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of what decides a figure; only what is installed."""
    found = {"python": platform.python_version()}
    for name in _DECIDING:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Model and number of usable cores, such as "AMD EPYC 7763, 2 cores"."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def parse_lengths(text: str, flag: str) -> tuple[tuple[int, int], ...]:
    """`"64"`, `"20:200"` (uniform between) or a comma list of these: `((low, high), ...)`."""
    try:
        pairs = [tuple(int(x) for x in part.split(":")) for part in text.split(",")]
        ranges = tuple((pair[0], pair[-1]) for pair in pairs if len(pair) <= 2)
        if len(ranges) == len(pairs) and all(1 <= low <= high for low, high in ranges):
            return ranges
    except ValueError:
        pass
    raise ConfigError(f"{flag} {text!r}: expected N, LOW:HIGH, or several of these with commas")


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """A comma list of whole numbers from 1."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(f"{flag} {text!r}: expected whole numbers from 1, separated by commas")
    return counts


def _document_of(case: Case) -> dict[str, Any]:
    values = asdict(case)
    more = values.pop("more")
    return _finite({**values, "reached": case.reached, **more})


def _finite(value: Any) -> Any:
    """JSON knows no nan; what could not be measured is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
