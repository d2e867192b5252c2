"""KV memory that is held and holds nothing: page rounding beside cached, free and reserved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossdock.core import ConfigError

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOLERATED_WASTE = 0.01
"""Expected waste up to which a larger page is preferred: its tables are shorter, its reads longer,
but it is also the grain in which prefixes are shared."""
_SAMPLES, _SEED = 20_000, 0


@dataclass(frozen=True)
class Fragmentation:
    """Of requests that hold KV for some number of tokens, in pages of `page_size` tokens.

    `expected`: tokens of page rounding over tokens reserved, all requests together; `p99`: the
    same of a single request at the 99th percentile; `tokens`: rounding per request on average.
    """

    page_size: int
    tokens: float
    expected: float
    p99: float

    @property
    def reserved_over_used(self) -> float:
        return 1 / (1 - self.expected)


def fragmentation(lengths: Sequence[int] | np.ndarray, page_size: int) -> Fragmentation:
    """`lengths`: tokens that requests hold, a sample of their distribution, each above 0."""
    used = np.asarray(lengths, dtype=np.int64)
    if not used.size or used.min() < 1:
        raise ConfigError("lengths of requests must be at least 1, and there must be one")
    if page_size < 1:
        raise ConfigError(f"page_size must be at least 1, got {page_size}")
    reserved = -(-used // page_size) * page_size
    waste = reserved - used
    return Fragmentation(
        page_size=page_size,
        tokens=float(waste.mean()),
        expected=float(waste.sum() / reserved.sum()),
        p99=float(np.quantile(waste / reserved, 0.99)),
    )


def best_page_size(
    lengths: Sequence[int] | np.ndarray,
    sizes: Sequence[int] = PAGE_SIZES,
    tolerated: float = TOLERATED_WASTE,
) -> Fragmentation:
    """The largest of `sizes` whose expected waste is tolerated, else the smallest."""
    all_of_them = [fragmentation(lengths, size) for size in sorted(sizes)]
    return next((f for f in reversed(all_of_them) if f.expected <= tolerated), all_of_them[0])


def lifetime(prompt: int, output: int) -> np.ndarray:
    """Tokens that a request holds at each of its decode steps."""
    return np.arange(prompt, prompt + max(1, output))


def parse_lengths(text: str) -> np.ndarray:
    """A sample of "N", "uniform:LOW:HIGH", "lognormal:MEDIAN:P99", or a file with a length a line.

    Raises:
        ConfigError: it is none of these.
    """
    if Path(text).is_file():
        words = Path(text).read_text(encoding="utf-8").split()
        if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(f"{text}: expected one length per line, integers above 0")
        return np.array([int(word) for word in words])
    rng = np.random.default_rng(_SEED)
    if re.fullmatch(r"[1-9]\d*", text):
        return np.array([int(text)])
    if match := re.fullmatch(r"(uniform|lognormal):(\d+):(\d+)", text):
        low, high = int(match[2]), int(match[3])
        if 0 < low <= high:
            if match[1] == "uniform":
                return rng.integers(low, high + 1, _SAMPLES)
            sigma = np.log(high / low) / 2.326  # the normal's 99th percentile
            return np.maximum(1, np.rint(rng.lognormal(np.log(low), sigma, _SAMPLES))).astype(int)
    raise ConfigError(
        f"request lengths {text!r}: expected N, uniform:LOW:HIGH, lognormal:MEDIAN:P99 or a file"
    )


@dataclass(frozen=True)
class KVState:
    """The KV pages of a running server, over all ranks. `used`: held by requests; `cached`: kept
    for their prefix, given up when needed; `reserved`: still due to running requests' prompts, a
    part of `free` and `cached`. `tokens`: KV in used pages."""

    page_size: int
    used: int
    cached: int
    free: int
    reserved: int
    tokens: int

    @property
    def rounding(self) -> float:
        """Share of used pages that holds nothing."""
        held = self.used * self.page_size
        return 1 - self.tokens / held if held else 0.0

    @property
    def reserved_over_used(self) -> float:
        """Memory of used pages over that of the tokens in them."""
        return self.used * self.page_size / self.tokens if self.tokens else 1.0

    def lines(self) -> list[str]:
        total = self.used + self.cached + self.free
        held = self.used * self.page_size
        return [
            f"used: {self.used:,} of {total:,} pages of {self.page_size} tokens, {self.tokens:,} "
            f"tokens in {held:,} places; page rounding {self.rounding:.1%}, reserved over used "
            f"{self.reserved_over_used:.3f}",
            f"cached for prefixes, given up when needed: {self.cached:,} pages",
            f"free: {self.free:,} pages; of free and cached ones {self.reserved:,} are reserved "
            "for prompts that are running",
        ]


def kv_state(exposition: str) -> KVState:
    """From the text of a crossdock server's `/metrics`.

    Raises:
        ConfigError: it has no such samples.
    """
    samples = _samples(exposition)

    def value(name: str) -> int:
        if name not in samples:
            raise ConfigError(
                f"the metrics have no {name}; expected the /metrics of a crossdock server"
            )
        return round(samples[name])

    return KVState(
        page_size=value("crossdock:kv_page_size_tokens"),
        used=value('crossdock:kv_pages{state="used"}'),
        cached=value('crossdock:kv_pages{state="cached"}'),
        free=value('crossdock:kv_pages{state="free"}'),
        reserved=value("crossdock:kv_pages_reserved"),
        tokens=value("crossdock:kv_tokens"),
    )


def _samples(exposition: str) -> Mapping[str, float]:
    lines = (line.rpartition(" ") for line in exposition.splitlines() if line[:1] not in ("#", ""))
    found = {}
    for name, _, number in lines:
        try:
            found[name] = float(number)
        except ValueError:
            continue
    return found
