"""BF16 products over masked rows against fp32 twins: small shapes, interpreted where there is no
GPU."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels.grouped_gemm import masked_gemm_twin
from crossdock.kernels.masked_gemm_bf16 import masked_gated_bf16, masked_gemm_bf16
from crossdock.kernels.swiglu import swiglu_twin

PLAIN = tiles.MaskedTile(bm=16, bo=64, bk=64, warps=4, stages=2)
MORE = tiles.MaskedTile(bm=16, bo=64, bk=64, warps=4, stages=3, more=32, more_stages=2)
WIDE = tiles.MaskedTile(bm=32, bo=64, bk=128, warps=4, stages=2)
"""Of 192 columns its second step has 64."""
TILES = pytest.mark.parametrize("tile", [PLAIN, MORE, WIDE], ids=["plain", "more", "wide"])
CAPACITY = 70


def masked(counts: list[int], width: int, out: int, device: torch.device) -> tuple[Tensor, ...]:
    """x, w, counts, which rows are there; the others are NaN."""
    x = torch.randn(len(counts), CAPACITY, width, device=device).bfloat16()
    w = (torch.randn(len(counts), out, width, device=device) * width**-0.5).bfloat16()
    counts_S = torch.tensor(counts, dtype=torch.int32, device=device)
    here = torch.arange(CAPACITY, device=device) < counts_S[:, None]
    x[~here] = float("nan")  # no row may see what lies beyond its slot's count
    return x, w, counts_S, here


def error(got: Tensor, want: Tensor) -> float:
    """Relative, over all rows; NaN where a row was not written."""
    return ((got.float() - want).norm() / want.norm()).item() if want.numel() else 0.0


@TILES
@pytest.mark.parametrize("counts", [[17, 0, 5], [16, 65, 1], [0, 0, 0]])
def test_product(device: torch.device, counts: list[int], tile: tiles.MaskedTile) -> None:
    x, w, counts_S, here = masked(counts, 192, 96, device)
    got = masked_gemm_bf16(x, w, counts_S, 16, tile=tile)
    want = masked_gemm_twin(x.float(), w.float(), counts_S)
    assert error(got[here], want[here]) < 4e-3


@TILES
@pytest.mark.parametrize("counts", [[17, 0, 5], [16, 65, 1], [0, 0, 0]])
@pytest.mark.parametrize("width", [128, 96])
def test_gated_product(
    device: torch.device, counts: list[int], width: int, tile: tiles.MaskedTile
) -> None:
    """Also where a tile's last columns are none of gate's. Rows are counted once."""
    x, w, counts_S, here = masked(counts, 128, 2 * width, device)
    rows_S = torch.randint(1 << 40, (len(counts),), device=device)
    total_S = rows_S + counts_S
    got = masked_gated_bf16(x, w, counts_S, 16, rows_S, tile=tile)
    assert torch.equal(rows_S, total_S)
    want = swiglu_twin(masked_gemm_twin(x.float(), w.float(), counts_S))
    assert got.shape == want.shape
    assert error(got[here], want[here]) < 4e-3


def test_wrong_shapes_are_named(device: torch.device) -> None:
    x, w, counts_S, _ = masked([3, 1], 192, 96, device)
    with pytest.raises(ValueError, match="expected BF16 rows and weights; got"):
        masked_gemm_bf16(x.float(), w, counts_S, 16)
    with pytest.raises(ValueError, match="192 wide and weights 128: expected the same multiple"):
        masked_gemm_bf16(x, w[:, :, :128], counts_S, 16)
    with pytest.raises(ValueError, match=r"weights of 1 slots.*expected int32 \(2,\)"):
        masked_gated_bf16(x, w[:1], counts_S, 16)
    with pytest.raises(ValueError, match="as many rows of gate as of up; got 95"):
        masked_gated_bf16(x, w[:, :95].contiguous(), counts_S, 16)
