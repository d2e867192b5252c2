"""Products of fixed tiles against float64; on GPUs also bit by bit, a row alone against the same
row among others."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crossdock.kernels.linear_invariant import (
    batch_matmul_invariant,
    grouped_linear_invariant,
    linear_invariant,
    tile_ends,
)
from crossdock.kernels.rms_norm import add_rms_norm_invariant, rms_norm_invariant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
SHAPES = [(1, 1), (8, 45), (70, 33), (64, 128), (130, 300)]
"""(N, K)"""
MOST = 300


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < TOLERANCE[got.dtype]


def spans(seed: int) -> Iterator[slice]:
    """Of every length up to MOST, beginning anywhere."""
    generator = torch.Generator().manual_seed(seed)
    for n in range(1, MOST + 1):
        start = int(torch.randint(MOST - n + 1, (1,), generator=generator))
        yield slice(start, start + n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_products_against_float64(N: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    for rows in (1, 3, 65):
        x, w, b = (randn(*s, dtype=dtype) for s in ((rows, K), (N, K), (N,)))
        close(linear_invariant(x, w), x.double() @ w.double().T)
        close(linear_invariant(x, w, b), x.double() @ w.double().T + b.double())
        wide = linear_invariant(x, w, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        close(wide, x.double() @ w.double().T)
        strided = randn(rows, K + 3, dtype=dtype)[:, 1:-2]
        close(linear_invariant(strided, w), strided.double() @ w.double().T)
        x_GTK = randn(rows, 3, K, dtype=dtype).transpose(0, 1)
        for w_GKN in (
            randn(3, K, N, dtype=dtype),
            randn(3, N, K, dtype=dtype).transpose(1, 2),
            randn(3, K + 5, N, dtype=dtype)[:, 2:-3],
        ):
            close(batch_matmul_invariant(x_GTK, w_GKN), x_GTK.double() @ w_GKN.double())
    none = linear_invariant(randn(0, K, dtype=dtype), randn(N, K, dtype=dtype))
    assert none.shape == (0, N)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_against_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    N, K = 40, 72
    for counts in ([0, 0, 0], [5], [0, 70, 1, 0, 64, 0], [128, 3, 0, 33, 1, 1, 1, 200, 0]):
        w = randn(len(counts), N, K, dtype=dtype)
        x = randn(sum(counts), K, dtype=dtype)
        ends = torch.tensor(counts, device=DEVICE).cumsum(0)
        got = grouped_linear_invariant(x, w, ends, tile_ends(ends, dtype))
        parts = zip(x.double().split(counts), w.double(), strict=True)
        close(got, torch.cat([rows @ w_NK.T for rows, w_NK in parts]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 4 .*float32 .* weight of 5"):
        linear_invariant(randn(2, 4), randn(3, 5))
    with pytest.raises(ValueError, match="bfloat16"):
        linear_invariant(randn(2, 4), randn(3, 4, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [*SHAPES, (320, 2048), (2048, 768), (160, 7168), (2112, 7168)])
def test_a_row_alone_is_the_same_row(N: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(K)
    x, w, b = (randn(*s, dtype=dtype) for s in ((MOST, K), (N, K), (N,)))
    alone = torch.cat([linear_invariant(x[i : i + 1], w, b) for i in range(MOST)])
    close(alone, x.double() @ w.double().T + b.double())
    for rows in spans(N):
        assert torch.equal(linear_invariant(x[rows], w, b), alone[rows]), rows
        first = slice(0, rows.stop - rows.start)
        assert torch.equal(linear_invariant(x[first], w, b), alone[first]), first
    order = torch.randperm(MOST, device=DEVICE)
    assert torch.equal(linear_invariant(x[order], w, b), alone[order])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("G", "N", "K"), [(16, 512, 128), (16, 128, 512), (3, 19, 9)])
def test_a_row_of_a_batch_alone(G: int, N: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(K)
    x = randn(MOST, G, K + 8, dtype=dtype)[..., :K].transpose(0, 1)
    for w in (randn(G, K, N, dtype=dtype), randn(G, N, K, dtype=dtype).transpose(1, 2)):
        alone = torch.cat([batch_matmul_invariant(x[:, i : i + 1], w) for i in range(MOST)], dim=1)
        for rows in spans(N):
            assert torch.equal(batch_matmul_invariant(x[:, rows], w), alone[:, rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(1408, 2048), (24, 48), (37, 45)])
def test_a_row_of_a_slot_alone(N: int, K: int, dtype: torch.dtype) -> None:
    """Whatever the slot, and however many rows it and the others have."""
    torch.manual_seed(K)
    x, w = randn(MOST, K, dtype=dtype), randn(N, K, dtype=dtype)

    def product(rows: Tensor, slot: int, counts: list[int]) -> Tensor:
        counts = [*counts[:slot], len(rows), *counts[slot:]]
        start = sum(counts[:slot])
        mixed = randn(sum(counts), K, dtype=dtype)
        mixed[start : start + len(rows)] = rows
        weights = randn(len(counts), N, K, dtype=dtype)
        weights[slot] = w
        ends = torch.tensor(counts, device=DEVICE).cumsum(0)
        got = grouped_linear_invariant(mixed, weights, ends, tile_ends(ends, dtype))
        return got[start : start + len(rows)]

    alone = torch.cat([product(x[i : i + 1], 0, []) for i in range(MOST)])
    close(alone, x.double() @ w.double().T)
    for i, rows in enumerate(list(spans(N))[::7]):
        others = torch.randint(90, (5,), generator=torch.Generator().manual_seed(i)).tolist()
        assert torch.equal(product(x[rows], i % 6, others), alone[rows]), (rows, others)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [13, 48, 128, 2048, 7168])
def test_a_norm_of_a_row_alone(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, other = (randn(MOST, width + 5, dtype=dtype)[:, 2:-3] for _ in range(2))
    weight = randn(width, dtype=dtype)
    alone = torch.cat([rms_norm_invariant(x[i : i + 1], weight, 1e-6) for i in range(MOST)])
    norm = x.double().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    close(alone, x.double() * norm * weight.double())
    both = [add_rms_norm_invariant(x[i : i + 1], other[i : i + 1], weight, 1e-6)[0]
            for i in range(MOST)]  # fmt: skip
    for rows in spans(width):
        assert torch.equal(rms_norm_invariant(x[rows], weight, 1e-6), alone[rows])
        got = add_rms_norm_invariant(x[rows], other[rows], weight, 1e-6)[0]
        assert torch.equal(got, torch.cat(both[rows]))
