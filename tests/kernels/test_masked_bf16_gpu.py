"""BF16 products over masked rows compiled, at real widths, every row against fp32 products."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crossdock.kernels.grouped_gemm import masked_gemm_twin
from crossdock.kernels.masked_gemm_bf16 import masked_gated_bf16, masked_gemm_bf16
from crossdock.kernels.swiglu import swiglu_twin

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN = float("nan")
HIDDEN, CAPACITY = 2048, 300


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def poison() -> None:
    """Fill the memory that the next outputs will come from with NaN."""
    memory = torch.full((1 << 28,), NAN, dtype=torch.bfloat16, device=CUDA)
    del memory


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row; inf where a row holds a NaN."""
    if not want.numel():
        return 0.0
    rows = (got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20)
    return float(rows.nan_to_num(float("inf")).max())


def weights(slots: int, out: int, width: int) -> Tensor:
    return (torch.randn(slots, out, width, device=CUDA) * width**-0.5).bfloat16()


@pytest.mark.parametrize("counts", [[16, 0, 1, 300], [0, 0, 0, 0], [33, 64, 65, 129]], ids=str)
@pytest.mark.parametrize("expected", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [768, 1408, 580])
def test_products(width: int, expected: int, counts: list[int]) -> None:
    """580: no multiple of a tile."""
    counts_S = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    here = torch.arange(CAPACITY, device=CUDA) < counts_S[:, None]
    x = torch.randn(4, CAPACITY, HIDDEN, device=CUDA).bfloat16()
    x[~here] = NAN
    w = weights(4, 2 * width, HIDDEN)
    full = masked_gemm_twin(x.float(), w.float(), counts_S)
    poison()
    got = masked_gemm_bf16(x, w, counts_S, expected)
    assert worst_row(got[here], full[here]) < 6e-3
    poison()
    gated = masked_gated_bf16(x, w, counts_S, expected)
    assert worst_row(gated[here], swiglu_twin(full)[here]) < 6e-3


def test_layers_replay_with_new_counts_rows_and_weights() -> None:
    """One product after the other, as a step has them."""
    slots, width = 64, 768
    x = torch.zeros(slots, CAPACITY, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    counts_S = torch.zeros(slots, device=CUDA, dtype=torch.int32)
    rows_S = torch.zeros(slots, device=CUDA, dtype=torch.int64)
    gate_up, down = weights(slots, 2 * width, HIDDEN), weights(slots, HIDDEN, width)

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
        gate_up.copy_(weights(slots, 2 * width, HIDDEN))
        got.fill_(NAN)
        rows_S.zero_()
        graph.replay()
        assert torch.equal(rows_S, 3 * counts_S.long())
        here = torch.arange(CAPACITY, device=CUDA) < counts_S[:, None]
        want = x.float()
        for _ in range(3):
            gated = swiglu_twin(masked_gemm_twin(want, gate_up.float(), counts_S))
            want = masked_gemm_twin(gated.bfloat16().float(), down.float(), counts_S)
            want = want.bfloat16().float()
        assert worst_row(got[here], want[here]) < 5e-2
        assert got[~here].isnan().all()
