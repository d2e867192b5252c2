"""How large a rank's symmetric buffer is, and what lies where in it: pure arithmetic, so that a
planner can do it without the transport's kernels."""

from dataclasses import dataclass
from functools import cached_property

SETS = 2
"""Buffer sets: as many exchanges may be in flight."""
LOW_LATENCY_TOKENS = 256
"""Up to so many tokens per rank a flag stands for one token, unless set otherwise."""
SCALE_BLOCK = 128
"""Values of a row that share one FP8 scale."""
MAX_TOP_K = 16
"""Experts of a token; a record beside each row has room for so many."""
_CHUNK, _HOME_CHUNK, _RECORD_BYTES, _ALIGN = 4, 2, 128, 256


def padded(width: int) -> int:
    """To whole blocks of scales."""
    return -(-width // SCALE_BLOCK) * SCALE_BLOCK


def fp8_expert_bytes(hidden: int, width: int) -> int:
    """Of one expert's codes and scales, in one layer."""
    codes = 3 * padded(hidden) * padded(width)
    return codes + codes // SCALE_BLOCK**2 * 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Staging:
    """`itemsize`: bytes of an element of x and of what comes home. Per set: count words of both
    phases [2, R], flags [R, U] and [R, V], records [R, T, 32] int32, rows [R, T, H], scales
    [R, T, H / 128] where FP8 travels, home [R, T, H] or, per expert, [T, K, H].

    Only this staging is sized for the worst case, all tokens of all ranks on one.
    """

    ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    itemsize: int
    fp8: bool = False
    per_expert: bool = False
    low_latency_tokens: int = LOW_LATENCY_TOKENS

    @cached_property
    def low_latency(self) -> bool:
        return self.max_tokens <= self.low_latency_tokens

    @cached_property
    def chunk(self) -> int:
        """Tokens per flag of dispatch."""
        return 1 if self.low_latency else _CHUNK

    @cached_property
    def home_chunk(self) -> int:
        """Tokens per flag of combine: few, since home sums a unit once all of it came."""
        return 1 if self.low_latency else _HOME_CHUNK

    @cached_property
    def units(self) -> int:
        """U, flags per source of dispatch."""
        return -(-self.max_tokens // self.chunk)

    @cached_property
    def home_units(self) -> int:
        """V, flags per source of combine."""
        return -(-self.max_tokens // self.home_chunk)

    @cached_property
    def row_bytes(self) -> int:
        """Of a dispatched row, its scales included."""
        wide = self.hidden * self.itemsize
        return self.hidden + self.hidden // SCALE_BLOCK * 4 if self.fp8 else wide

    @cached_property
    def cells(self) -> int:
        """Staged rows, N."""
        return self.ranks * self.max_tokens

    def counts(self, phase: int) -> int:
        return phase * _aligned(self.ranks * 8)

    def flags(self, phase: int) -> int:
        sizes = (self.units, self.home_units)[:phase]
        return self.counts(2) + sum(_aligned(self.ranks * units * 8) for units in sizes)

    @cached_property
    def records(self) -> int:
        return self.flags(2)

    @cached_property
    def rows(self) -> int:
        return self.records + _aligned(self.cells * _RECORD_BYTES)

    @cached_property
    def scales(self) -> int:
        element = 1 if self.fp8 else self.itemsize
        return self.rows + _aligned(self.cells * self.hidden * element)

    @cached_property
    def home(self) -> int:
        count = self.hidden // SCALE_BLOCK * 4 if self.fp8 else 0
        return self.scales + _aligned(self.cells * count)

    @cached_property
    def set_bytes(self) -> int:
        cells = self.max_tokens * self.top_k if self.per_expert else self.cells
        return self.home + _aligned(cells * self.hidden * self.itemsize)

    @cached_property
    def nbytes(self) -> int:
        return SETS * self.set_bytes
