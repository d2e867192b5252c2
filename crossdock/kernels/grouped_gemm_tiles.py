"""Tile shapes, measured once on an H200 and kept here: nothing is tuned at start.

Rows are what a slot is expected to hold, known to the caller without asking the device.
"""

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    bm: int
    """rows"""
    bo: int
    """outputs"""
    bk: int
    """of the input width per step"""
    warps: int
    stages: int
    swap: bool = False
    """weights as the tensor core's left operand, see `grouped_gemm_triton`"""
    more: int = 0
    """rows of a tile in slots that have more than bm: popular experts get several times the mean"""


@dataclass(frozen=True)
class MaskedTile:
    """See `masked_gemm_bf16`, whose weights are always the left operand."""

    bm: int
    bo: int
    """outputs; a gated product reads twice as many rows of weights"""
    bk: int
    warps: int
    stages: int
    more: int = 0
    more_stages: int = 1
    """of tiles of `more` rows: as many as leave the memory of a multiprocessor to as many programs
    as tiles of bm rows do, since one program has both"""


@dataclass(frozen=True)
class HopperTile:
    """128 rows x 256 outputs, see `grouped_gemm_hopper`."""

    stages: int = 4


GROUPED_FP8 = Tile(bm=128, bo=128, bk=128, warps=8, stages=3)
# (most rows per slot, tile): the first that covers the expected rows, else the last.
_FEW_FP8 = (
    (16, Tile(bm=16, bo=128, bk=128, warps=4, stages=5, swap=True, more=64)),
    (32, Tile(bm=32, bo=128, bk=128, warps=4, stages=5, swap=True, more=64)),
    (64, Tile(bm=64, bo=128, bk=128, warps=4, stages=4)),
)
MASKED_FP8: tuple[tuple[int, Tile], ...] = (
    *_FEW_FP8,
    (128, Tile(bm=128, bo=128, bk=128, warps=8, stages=3)),
)
# Few rows are bound by reading the weights, which the portable kernel does as fast.
HOPPER_MASKED_FP8: tuple[tuple[int, Tile | HopperTile], ...] = (*_FEW_FP8, (128, HopperTile()))
# Few rows: many slots may be without any, whose weights are not worth asking for.
# At 604 MB of Qwen3's experts and 554 of DeepSeek-V2-Lite's: 3.4 TB/s at 96 rows a slot, 4.0 at 12.
# Beginning early (programmatic dependent launch) and asking L2 for weights ahead gained nothing.
MASKED_GATED_BF16 = (
    (16, MaskedTile(bm=16, bo=64, bk=64, warps=4, stages=5, more=64, more_stages=4)),
    (32, MaskedTile(bm=32, bo=64, bk=128, warps=4, stages=2, more=64, more_stages=2)),
    (64, MaskedTile(bm=64, bo=64, bk=64, warps=4, stages=4, more=128, more_stages=3)),
    (128, MaskedTile(bm=128, bo=64, bk=64, warps=4, stages=3)),
)
MASKED_BF16 = (
    (16, MaskedTile(bm=16, bo=128, bk=64, warps=4, stages=5, more=64, more_stages=4)),
    (32, MaskedTile(bm=32, bo=64, bk=128, warps=4, stages=4, more=64, more_stages=3)),
    (64, MaskedTile(bm=64, bo=128, bk=64, warps=4, stages=4, more=128, more_stages=3)),
    (128, MaskedTile(bm=128, bo=128, bk=64, warps=4, stages=3)),
)


def tile_for(table: tuple[tuple[int, T], ...], rows: int) -> T:
    return next((tile for most, tile in table if rows <= most), table[-1][1])
