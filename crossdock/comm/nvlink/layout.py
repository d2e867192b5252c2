"""What lies where in a rank's symmetric buffer."""

from dataclasses import dataclass

from crossdock.core import CapacityError

SETS = 2
"""Buffer sets: as many exchanges may be in flight."""
LOW_LATENCY_TOKENS = 256
"""Up to so many tokens per rank a flag stands for one token."""
_CHUNK = 8
_ALIGN = 256
_MAX_K, _BLOCK, _MAX_RANKS, _MAX_TOKENS = 16, 128, 64, (1 << 24) - 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class NvlinkLayout:
    """`itemsize`: bytes of an element of x and of what comes home. Per set: count words of both
    phases [2, R], flags of both phases [2, R, U], records [R, T, 32] int32, rows [R, T, H], scales
    [R, T, H / 128] where FP8 travels, home [R, T, H] or, per expert, [T, K, H].

    Raises:
        CapacityError: something the kernels cannot serve.
    """

    ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    itemsize: int
    fp8: bool = False
    per_expert: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("ranks", self.ranks, _MAX_RANKS),
            ("max_tokens", self.max_tokens, _MAX_TOKENS),
            ("top_k", self.top_k, _MAX_K),
        ):
            if not 1 <= value <= most:
                raise CapacityError(f"the nvlink transport takes {name} 1 to {most}, got {value}")
        if self.hidden % _BLOCK or self.hidden < _BLOCK:
            raise CapacityError(
                f"the nvlink transport takes a hidden size that is a multiple of {_BLOCK}, got "
                f'{self.hidden}; set transport = "collective"'
            )

    @property
    def low_latency(self) -> bool:
        return self.max_tokens <= LOW_LATENCY_TOKENS

    @property
    def chunk(self) -> int:
        """Tokens per flag."""
        return 1 if self.low_latency else _CHUNK

    @property
    def units(self) -> int:
        """U, flags per source."""
        return -(-self.max_tokens // self.chunk)

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row, its scales included."""
        wide = self.hidden * self.itemsize
        return self.hidden + self.hidden // _BLOCK * 4 if self.fp8 else wide

    @property
    def cells(self) -> int:
        """Staged rows, N."""
        return self.ranks * self.max_tokens

    def counts(self, phase: int) -> int:
        return phase * _aligned(self.ranks * 8)

    def flags(self, phase: int) -> int:
        return self.counts(2) + phase * _aligned(self.ranks * self.units * 8)

    @property
    def records(self) -> int:
        return self.flags(2)

    @property
    def rows(self) -> int:
        return self.records + _aligned(self.cells * _MAX_K * 8)

    @property
    def scales(self) -> int:
        element = 1 if self.fp8 else self.itemsize
        return self.rows + _aligned(self.cells * self.hidden * element)

    @property
    def home(self) -> int:
        count = self.hidden // _BLOCK * 4 if self.fp8 else 0
        return self.scales + _aligned(self.cells * count)

    @property
    def set_bytes(self) -> int:
        cells = self.max_tokens * self.top_k if self.per_expert else self.cells
        return self.home + _aligned(cells * self.hidden * self.itemsize)

    @property
    def nbytes(self) -> int:
        return SETS * self.set_bytes


def nvlink_bytes(
    ranks: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    itemsize: int = 2,
    fp8: bool = False,
    per_expert: bool = False,
) -> int:
    """Bytes of symmetric memory that each rank needs."""
    return NvlinkLayout(ranks, max_tokens, hidden, top_k, itemsize, fp8, per_expert).nbytes
