"""When requests arrive and how long they are: drawn, or read from a trace."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossdock.core import ConfigError


@dataclass(frozen=True)
class Arrival:
    """`prefix`: requests that give the same one share their first `prefix_tokens`."""

    time_s: float
    isl: int
    osl: int
    prefix: str | None = None
    prefix_tokens: int = 0


def poisson(
    rate: float, duration_s: float, isl: int, osl: int, seed: int = 0
) -> tuple[Arrival, ...]:
    """`rate` requests per second on average, independent of one another, for `duration_s`."""
    return profile_arrivals([rate], duration_s, isl, osl, seed)


def profile_arrivals(
    rates: Sequence[float], step_s: float, isl: int, osl: int, seed: int = 0
) -> tuple[Arrival, ...]:
    """Poisson with a rate that changes every `step_s`, such as 24 rates of an hour each.

    Raises:
        ConfigError: a rate below 0, or a time not above 0.
    """
    if not step_s > 0:
        raise ConfigError(f"the time simulated must be above 0 s, got {step_s}")
    rng = np.random.default_rng(seed)
    times: list[float] = []
    for index, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"request rate {rate}: expected a number of at least 0")
        start = index * step_s
        times += sorted(start + rng.random(rng.poisson(rate * step_s)) * step_s)
    return tuple(Arrival(float(t), isl, osl) for t in times)


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """JSON lines of `arrival_s`, `isl`, `osl` and, where prompts share their beginning, `prefix`
    (any id) with `prefix_tokens`. Sorted by arrival; times start at 0.

    Raises:
        ConfigError: names the file, the line and what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    arrivals = [
        _arrival(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not arrivals:
        raise ConfigError(f"{path}: no requests; expected a JSON object a line")
    arrivals.sort(key=lambda a: a.time_s)
    first = arrivals[0].time_s
    return tuple(
        Arrival(a.time_s - first, a.isl, a.osl, a.prefix, a.prefix_tokens) for a in arrivals
    )


def _arrival(line: str, where: str) -> Arrival:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object with arrival_s, isl and osl")
    unknown = row.keys() - {"arrival_s", "isl", "osl", "prefix", "prefix_tokens"}
    if unknown:
        raise ConfigError(f"{where}: unknown key {sorted(unknown)[0]!r}")
    isl, osl = (_tokens(row, key, where) for key in ("isl", "osl"))
    time = row.get("arrival_s")
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not math.isfinite(time):
        raise ConfigError(f"{where}: arrival_s: expected seconds, got {time!r}")
    prefix, shared = row.get("prefix"), row.get("prefix_tokens", 0)
    if (prefix is None) != (shared == 0):
        raise ConfigError(f"{where}: prefix and prefix_tokens go together")
    if not isinstance(shared, int) or not 0 <= shared <= isl:
        raise ConfigError(f"{where}: prefix_tokens: expected 0 to isl ({isl}), got {shared!r}")
    return Arrival(float(time), isl, osl, None if prefix is None else str(prefix), shared)


def _tokens(row: dict[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {key}: expected a number of tokens from 1, got {value!r}")
    return value
