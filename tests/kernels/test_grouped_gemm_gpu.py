"""Grouped and masked GEMM compiled, at real widths, every row against fp32 products."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import grouped_gemm as layouts
from crossdock.kernels import grouped_gemm_bf16 as bf16
from crossdock.kernels import grouped_gemm_fp8 as gemm
from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels import quant
from crossdock.kernels.masked_gemm_bf16 import masked_gated_bf16, masked_gemm_bf16
from crossdock.kernels.swiglu import swiglu_twin

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HIDDEN, CAPACITY = 2048, 300
GROUPED = [None, tiles.GROUPED_FP8]
MASKED = [tiles.HopperTile(), *(tile for _, tile in tiles.MASKED_FP8)]
# Width 7168 is 56 blocks and 2048 is 16; outputs that are no multiple of 256, nor of 128.
SHAPES = [(7168, 4096), (2048, 7168), (384, 1152), (256, 136)]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def poison() -> None:
    """Fill the memory that the next outputs will come from with NaN."""
    memory = torch.full((1 << 28,), float("nan"), dtype=torch.bfloat16, device=CUDA)
    del memory


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row; inf where a row holds a NaN."""
    if not want.numel():
        return 0.0
    rows = (got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20)
    return float(rows.nan_to_num(float("inf")).max())


@pytest.mark.parametrize("tile", GROUPED, ids=["default", "portable"])
@pytest.mark.parametrize("width,out", SHAPES)
@pytest.mark.parametrize("counts", [[128, 1, 0, 700, 0], [0, 0, 0, 0, 1300], [0, 0, 0, 0, 0]])
def test_grouped_fp8(
    counts: list[int], width: int, out: int, tile: tiles.Tile | tiles.HopperTile | None
) -> None:
    x, x_scale = quant.quantise_rows(torch.randn(2048, width, device=CUDA))
    w, w_scale = quant.quantise_weights(torch.randn(5, out, width, device=CUDA))
    segments = layouts.segments_of(torch.tensor(counts, dtype=torch.int32, device=CUDA), 2048)
    poison()
    got = gemm.grouped_gemm_fp8(x, x_scale, w, w_scale, segments, tile=tile)
    end = int(segments.offsets_S1[-1])
    want = layouts.grouped_gemm_twin(
        quant.dequantise_rows(x, x_scale), quant.dequantise_weights(w, w_scale), segments
    )
    assert worst_row(got[:end], want[:end]) < 6e-3


@pytest.mark.parametrize("width,out", [(2048, 1536), (768, 2048), (64, 136), (2048, 1408)])
@pytest.mark.parametrize("counts", [[128, 1, 0, 700, 0], [0, 0, 0, 0, 1300], [0, 0, 0, 0, 0]])
def test_grouped_bf16(counts: list[int], width: int, out: int) -> None:
    """Gated too: widths of half the outputs that are no multiple of a tile's."""
    x = torch.randn(2048, width, device=CUDA).bfloat16()
    w = torch.randn(5, out, width, device=CUDA).div_(width**0.5).bfloat16()
    segments = layouts.segments_of(torch.tensor(counts, dtype=torch.int32, device=CUDA), 2048)
    end = int(segments.offsets_S1[-1])
    want = layouts.grouped_gemm_twin(x.float(), w.float(), segments)
    poison()
    got = bf16.grouped_bf16(x, w, segments)
    assert got.shape == (2048, out) and worst_row(got[:end], want[:end]) < 6e-3
    if out % 16:
        return
    poison()
    got = bf16.grouped_gated_bf16(x, w, segments)
    assert got.shape == (2048, out // 2)
    assert worst_row(got[:end], swiglu_twin(want[:end])) < 8e-3


def test_grouped_bf16_writes_no_row_beyond_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(size: tuple[int, ...], **kind: Any) -> Tensor:
        return torch.full(size, float("nan"), **kind)

    x = torch.randn(1024, 256, device=CUDA).bfloat16()
    w = torch.randn(3, 512, 256, device=CUDA).bfloat16()
    segments = layouts.segments_of(torch.tensor([5, 0, 200], dtype=torch.int32, device=CUDA), 1024)
    for product in (bf16.grouped_bf16, bf16.grouped_gated_bf16):
        product(x, w, segments)  # compiled
        with monkeypatch.context() as patch:
            patch.setattr(bf16.torch, "empty", empty)
            got = product(x, w, segments)
        assert got[384:].isnan().all() and not got[:384].isnan().any()


@pytest.mark.parametrize("tile", GROUPED, ids=["default", "portable"])
def test_grouped_fp8_gathers_rows(tile: tiles.Tile | None) -> None:
    x, x_scale = quant.quantise_rows(torch.randn(300, 7168, device=CUDA))
    w, w_scale = quant.quantise_weights(torch.randn(3, 1152, 7168, device=CUDA))
    counts = torch.tensor([200, 0, 500], dtype=torch.int32, device=CUDA)
    segments = layouts.segments_of(counts, 1024)
    index = torch.randint(0, 300, (1024,), dtype=torch.int32, device=CUDA)
    index[200:256] = -1
    poison()
    got = gemm.grouped_gemm_fp8(x, x_scale, w, w_scale, segments, index, tile=tile)[:768]
    rows = quant.dequantise_rows(x, x_scale)[index.clamp_min(0).long()] * (index >= 0)[:, None]
    want = layouts.grouped_gemm_twin(rows, quant.dequantise_weights(w, w_scale), segments)[:768]
    assert worst_row(got, want) < 6e-3
    assert (got[200:256] == 0).all()


@pytest.mark.parametrize("tile", MASKED, ids=str)
@pytest.mark.parametrize("width,out", SHAPES)
@pytest.mark.parametrize("counts", [[16, 0, 1, 300], [0, 0, 0, 0], [0, 0, 0, 300]])
def test_masked_fp8(
    counts: list[int], width: int, out: int, tile: tiles.Tile | tiles.HopperTile
) -> None:
    x, x_scale = quant.quantise_rows(torch.randn(4 * 300, width, device=CUDA))
    x, x_scale = x.view(4, 300, width), x_scale.view(4, 300, -1)
    w, w_scale = quant.quantise_weights(torch.randn(4, out, width, device=CUDA))
    counts_S = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    here = torch.arange(300, device=CUDA) < counts_S[:, None]
    x_scale[~here] = float("nan")
    poison()
    got = gemm.masked_gemm_fp8(x, x_scale, w, w_scale, counts_S, 16, tile=tile)
    rows = quant.dequantise_rows(x, x_scale)
    want = layouts.masked_gemm_twin(rows, quant.dequantise_weights(w, w_scale), counts_S)
    assert worst_row(got[here], want[here]) < 6e-3


def test_a_graph_replays_with_new_counts_and_rows() -> None:
    x, x_scale = quant.quantise_rows(torch.randn(4 * 64, 2048, device=CUDA))
    x, x_scale = x.view(4, 64, 2048), x_scale.view(4, 64, -1)
    w, w_scale = quant.quantise_weights(torch.randn(4, 512, 2048, device=CUDA))
    counts_S = torch.tensor([3, 0, 64, 1], dtype=torch.int32, device=CUDA)
    gemm.masked_gemm_fp8(x, x_scale, w, w_scale, counts_S, 16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemm.masked_gemm_fp8(x, x_scale, w, w_scale, counts_S, 16)
    for counts in ([64, 0, 0, 2], [0, 33, 5, 64]):
        counts_S.copy_(torch.tensor(counts, dtype=torch.int32))
        codes, scales = quant.quantise_rows(torch.randn(4 * 64, 2048, device=CUDA))
        x.copy_(codes.view_as(x))
        x_scale.copy_(scales.view_as(x_scale))
        got.fill_(float("nan"))
        graph.replay()
        here = torch.arange(64, device=CUDA) < counts_S[:, None]
        rows = quant.dequantise_rows(x, x_scale)
        want = layouts.masked_gemm_twin(rows, quant.dequantise_weights(w, w_scale), counts_S)
        assert worst_row(got[here], want[here]) < 6e-3
        assert got[~here].isnan().all()  # nothing is written beyond the counts


def bf16_weights(slots: int, out: int, width: int) -> Tensor:
    return (torch.randn(slots, out, width, device=CUDA) * width**-0.5).bfloat16()


@pytest.mark.parametrize("counts", [[16, 0, 1, 300], [0, 0, 0, 0], [33, 64, 65, 129]], ids=str)
@pytest.mark.parametrize("expected", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [768, 1408, 580])
def test_masked_bf16(width: int, expected: int, counts: list[int]) -> None:
    """580: no multiple of a tile."""
    counts_S = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    here = torch.arange(CAPACITY, device=CUDA) < counts_S[:, None]
    x = torch.randn(4, CAPACITY, HIDDEN, device=CUDA).bfloat16()
    x[~here] = float("nan")
    w = bf16_weights(4, 2 * width, HIDDEN)
    full = layouts.masked_gemm_twin(x.float(), w.float(), counts_S)
    poison()
    got = masked_gemm_bf16(x, w, counts_S, expected)
    assert worst_row(got[here], full[here]) < 6e-3
    poison()
    gated = masked_gated_bf16(x, w, counts_S, expected)
    assert worst_row(gated[here], swiglu_twin(full)[here]) < 6e-3


def test_masked_bf16_layers_replay_with_new_counts_rows_and_weights() -> None:
    """One product after the other, as a step has them."""
    slots, width = 64, 768
    x = torch.zeros(slots, CAPACITY, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    counts_S = torch.zeros(slots, device=CUDA, dtype=torch.int32)
    rows_S = torch.zeros(slots, device=CUDA, dtype=torch.int64)
    gate_up, down = bf16_weights(slots, 2 * width, HIDDEN), bf16_weights(slots, HIDDEN, width)

    def layers() -> Tensor:
        rows = x
        for _ in range(3):
            gated = masked_gated_bf16(rows, gate_up, counts_S, 32, rows_S)
            rows = masked_gemm_bf16(gated, down, counts_S, 32)
        return rows

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers()
    for most in (20, 100, 3):
        counts_S.copy_(torch.randint(0, most, (slots,), dtype=torch.int32))
        x.normal_()
        gate_up.copy_(bf16_weights(slots, 2 * width, HIDDEN))
        got.fill_(float("nan"))
        rows_S.zero_()
        graph.replay()
        assert torch.equal(rows_S, 3 * counts_S.long())
        here = torch.arange(CAPACITY, device=CUDA) < counts_S[:, None]
        want = x.float()
        for _ in range(3):
            gated = swiglu_twin(layouts.masked_gemm_twin(want, gate_up.float(), counts_S))
            want = layouts.masked_gemm_twin(gated.bfloat16().float(), down.float(), counts_S)
            want = want.bfloat16().float()
        assert worst_row(got[here], want[here]) < 5e-2
        assert got[~here].isnan().all()
