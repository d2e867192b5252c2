"""Grouped and masked GEMM against fp32 twins: small shapes, interpreted where there is no GPU."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from crossdock.kernels import grouped_gemm as layouts
from crossdock.kernels import grouped_gemm_bf16 as bf16
from crossdock.kernels import grouped_gemm_fp8 as gemm
from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels import quant
from crossdock.kernels.grouped_gemm_gather import gather_rows, gather_rows_twin
from crossdock.kernels.rounding import quantise_blocks_torch
from crossdock.kernels.swiglu import swiglu_twin

SMALL = tiles.Tile(bm=64, bo=64, bk=128, warps=4, stages=2)
SWAP = tiles.Tile(bm=16, bo=64, bk=128, warps=4, stages=2, swap=True)
MORE = tiles.Tile(bm=16, bo=64, bk=128, warps=4, stages=2, swap=True, more=64)
COUNTS = [[3, 0, 130], [0, 0, 256], [0, 0, 0]]


class Fp8(NamedTuple):
    q: Tensor
    scale: Tensor
    value: Tensor
    """dequantised, fp32"""


def rows(*shape: int, device: torch.device) -> Fp8:
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-3, 3, (*shape[:-1], 1))).to(
        device
    )
    q, scale = quantise_blocks_torch(x)
    return Fp8(q, scale, quant.dequantise_rows(q, scale))


def weights(*shape: int, device: torch.device) -> Fp8:
    q, scale = quant.quantise_weights(torch.randn(shape, device=device))
    return Fp8(q, scale, quant.dequantise_weights(q, scale))


def error(got: Tensor, want: Tensor) -> float:
    """Relative, over all rows; NaN where a row was not written."""
    return ((got.float() - want).norm() / want.norm()).item() if want.numel() else 0.0


def test_segments_are_aligned_and_name_their_tiles(device: torch.device) -> None:
    counts = torch.tensor([2, 0, 130], dtype=torch.int32, device=device)
    segments = layouts.segments_of(counts, 640)
    assert segments.offsets_S1.tolist() == [0, 128, 128, 384]
    assert segments.tile_slots_M.tolist() == [0, 2, 2, 3, 3]
    assert segments.offsets_S1.dtype == segments.tile_slots_M.dtype == torch.int32
    with pytest.raises(ValueError, match="multiple of 128; got 200"):
        layouts.segments_of(counts, 200)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("out", [64, 160])
def test_grouped_fp8(device: torch.device, counts: list[int], out: int) -> None:
    x = rows(384, 256, device=device)
    w = weights(3, out, 256, device=device)
    segments = layouts.segments_of(torch.tensor(counts, dtype=torch.int32, device=device), 384)
    got = gemm.grouped_gemm_fp8(x.q, x.scale, w.q, w.scale, segments, tile=SMALL)
    end = int(segments.offsets_S1[-1])
    want = layouts.grouped_gemm_twin(x.value, w.value, segments)
    assert error(got[:end], want[:end]) < 4e-3


def test_grouped_fp8_gathers_rows(device: torch.device) -> None:
    x = rows(50, 256, device=device)
    w = weights(2, 96, 256, device=device)
    segments = layouts.segments_of(torch.tensor([40, 90], dtype=torch.int32, device=device), 256)
    index = torch.randint(0, 50, (256,), dtype=torch.int32, device=device)
    index[40:128] = -1
    index[218:] = -1
    got = gemm.grouped_gemm_fp8(x.q, x.scale, w.q, w.scale, segments, index, tile=SMALL)
    expanded = x.value[index.clamp_min(0).long()] * (index >= 0)[:, None]
    want = layouts.grouped_gemm_twin(expanded, w.value, segments)
    assert error(got, want) < 4e-3
    assert (got[index < 0] == 0).all()


def test_gathered_rows_equal_the_twin_and_stop_at_the_rows_in_use(device: torch.device) -> None:
    x = rows(20, 384, device=device)
    index = torch.randint(-1, 20, (30,), dtype=torch.int32, device=device)
    index[7] = -1
    end = torch.tensor([25], dtype=torch.int32, device=device)
    by_column = x.scale.T.contiguous().T
    got_q, got_scale = gather_rows(x.q, by_column, index, end)
    want_q, want_scale = gather_rows_twin(x.q, x.scale, index)
    assert torch.equal(got_q[:25].view(torch.uint8), want_q[:25].view(torch.uint8))
    assert torch.equal(got_scale[:25], want_scale[:25])
    assert (got_q[7].float() == 0).all()


def test_grouped_fp8_takes_scales_of_any_stride(device: torch.device) -> None:
    x = rows(128, 256, device=device)
    w = weights(1, 64, 256, device=device)
    segments = layouts.segments_of(torch.tensor([128], dtype=torch.int32, device=device), 128)
    by_column = x.scale.T.contiguous().T
    got = gemm.grouped_gemm_fp8(x.q, by_column, w.q, w.scale, segments, tile=SMALL)
    assert error(got, layouts.grouped_gemm_twin(x.value, w.value, segments)) < 4e-3


@pytest.mark.parametrize("counts", [[0, 1, 33], [40, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("tile", [SMALL, SWAP, MORE])
def test_masked_fp8(device: torch.device, counts: list[int], tile: tiles.Tile) -> None:
    x = rows(3, 40, 256, device=device)
    w = weights(3, 160, 256, device=device)
    counts_S = torch.tensor(counts, dtype=torch.int32, device=device)
    beyond = torch.arange(40, device=device) >= counts_S[:, None]
    x.scale[beyond] = float("nan")  # no row may see what lies beyond its slot's count
    got = gemm.masked_gemm_fp8(x.q, x.scale, w.q, w.scale, counts_S, 16, tile=tile)
    want = layouts.masked_gemm_twin(x.value, w.value, counts_S)
    assert torch.equal(want.isnan().all(-1), beyond)
    assert error(got[~beyond], want[~beyond]) < 4e-3


def test_grouped_bf16(device: torch.device) -> None:
    x = torch.randn(384, 64, device=device).bfloat16()
    w = torch.randn(3, 48, 64, device=device).bfloat16()
    segments = layouts.segments_of(torch.tensor([2, 0, 130], dtype=torch.int32, device=device), 384)
    want = layouts.grouped_gemm_twin(x.float(), w.float(), segments)
    assert error(bf16.grouped_bf16(x, w, segments), want) < 4e-3
    assert error(bf16.grouped_gated_bf16(x, w, segments), swiglu_twin(want)) < 6e-3


def test_bf16_rows_and_weights_that_do_not_fit_are_named(device: torch.device) -> None:
    x = torch.randn(128, 64, device=device).bfloat16()
    w = torch.randn(1, 48, 64, device=device).bfloat16()
    segments = layouts.segments_of(torch.tensor([128], dtype=torch.int32, device=device), 128)
    for rows, weights_, message in (
        (x.float(), w, "expected BF16 .* got torch.float32"),
        (x[:, :32].contiguous(), w, r"rows of 32 for 1 slots and weights \(1, 48, 64\)"),
        (x, w[:, :4].contiguous(), "outputs a multiple of 8"),
        (x, w.expand(2, -1, -1), r"for 1 slots and weights \(2, 48, 64\)"),
        (x.repeat(2, 1), w, "256 rows need a multiple of 128 and as many tile slots; got 1"),
        (x, w.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ):
        for product in (bf16.grouped_bf16, bf16.grouped_gated_bf16):
            with pytest.raises(ValueError, match=message):
                product(rows, weights_, segments)


def test_a_table_covers_every_number_of_rows() -> None:
    for table in (
        tiles.MASKED_FP8, tiles.HOPPER_MASKED_FP8, tiles.MASKED_BF16, tiles.MASKED_GATED_BF16,
    ):  # fmt: skip
        assert tiles.tile_for(table, 1) == table[0][1]
        assert tiles.tile_for(table, table[0][0] + 1) == table[1][1]
        assert tiles.tile_for(table, 100_000) == table[-1][1]


def test_wrong_shapes_are_named(device: torch.device) -> None:
    x = rows(128, 256, device=device)
    w = weights(1, 64, 256, device=device)
    segments = layouts.segments_of(torch.tensor([128], dtype=torch.int32, device=device), 128)
    with pytest.raises(ValueError, match=r"expected \(128, 2\) and \(1, 1, 2\), got \(128, 1\)"):
        gemm.grouped_gemm_fp8(x.q, x.scale[:, :1], w.q, w.scale, segments)
    with pytest.raises(ValueError, match="expected FP8 E4M3"):
        gemm.grouped_gemm_fp8(x.value, x.scale, w.q, w.scale, segments)
    with pytest.raises(ValueError, match="128 wide and weights 256"):
        gemm.grouped_gemm_fp8(x.q[:, :128], x.scale, w.q, w.scale, segments)
    with pytest.raises(ValueError, match=r"expected int32 \(1,\)"):
        counts = torch.tensor([1], device=device)
        gemm.masked_gemm_fp8(x.q[None], x.scale[None], w.q, w.scale, counts, 16)
