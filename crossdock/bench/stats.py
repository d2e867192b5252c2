"""Arithmetic of latencies, in seconds: percentiles, one request, a whole load. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from crossdock.core import ConfigError

SLO_NAMES = ("ttft", "tpot", "e2e")


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """`mean`, `median`, `p90`, `p99`."""
    mean = sum(values) / len(values) if values else math.nan
    points = {"median": 50, "p90": 90, "p99": 99}
    return {"mean": mean, **{name: percentile(values, q) for name, q in points.items()}}


def spread(total: int, chunks: int) -> list[int]:
    """`total` tokens over chunks of unknown size, as evenly as whole tokens go."""
    return [-(-total * (i + 1) // chunks) + (-total * i // chunks) for i in range(chunks)]


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. `arrivals`: (clock, tokens) of each chunk with tokens."""

    input_tokens: int
    start: float
    arrivals: tuple[tuple[float, int], ...]
    end: float
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None of a single token."""
        rest = self.output_tokens - 1
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / rest if rest else None

    @property
    def itl(self) -> list[float]:
        """Seconds between tokens, one entry for each token after the first.

        A chunk of k tokens shares its interval among them; those that came along with the first
        token have waited 0. So the entries add up to last arrival minus first.
        """
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in pairwise(self.arrivals):
            gaps += [(now - before) / count] * count
        return gaps

    def meets(self, slo: dict[str, float]) -> bool:
        """Whether every limit (seconds) is kept; a failed request keeps none."""
        return self.error is None and all(
            value is None or value <= limit
            for value, limit in ((getattr(self, name), limit) for name, limit in slo.items())
        )


@dataclass(frozen=True)
class LoadResult:
    """What a load came to. Rates are per second of `duration`; latencies are `summary`s."""

    successes: int
    failures: int
    duration: float
    input_tokens: int
    output_tokens: int
    request_rate: float
    input_rate: float
    output_rate: float
    goodput: float | None
    latencies: dict[str, dict[str, float]]
    quartiles: dict[str, tuple[float, float]]
    counts: dict[str, int]


def load_result(
    records: Sequence[RequestRecord], duration: float, slo: dict[str, float] | None = None
) -> LoadResult:
    done = [r for r in records if r.error is None]
    series = {
        "ttft": [r.ttft for r in done],
        "tpot": [t for r in done if (t := r.tpot) is not None],
        "itl": [gap for r in done for gap in r.itl],
        "e2e": [r.e2e for r in done],
    }
    tokens_in = sum(r.input_tokens for r in done)
    tokens_out = sum(r.output_tokens for r in done)
    return LoadResult(
        successes=len(done),
        failures=len(records) - len(done),
        duration=duration,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        request_rate=len(done) / duration,
        input_rate=tokens_in / duration,
        output_rate=tokens_out / duration,
        goodput=sum(r.meets(slo) for r in records) / duration if slo else None,
        latencies={name: summary(values) for name, values in series.items()},
        quartiles={n: (percentile(v, 25), percentile(v, 75)) for n, v in series.items()},
        counts={name: len(values) for name, values in series.items()},
    )


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]`, in milliseconds, as seconds by name."""
    slo = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLO_NAMES or not limit > 0:
            raise ConfigError(
                f"--goodput {word!r}: expected NAME:MILLISECONDS with NAME one of "
                f"{', '.join(SLO_NAMES)}, such as ttft:500"
            )
        slo[name] = limit / 1e3
    return slo
