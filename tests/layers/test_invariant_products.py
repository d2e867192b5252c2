"""Rows of invariant products: the same bits for any number of rows, at any place among them."""

from collections.abc import Iterator

import pytest
import torch

from crossdock.layers import choose_products, linear

ROWS = 70


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def windows(seed: int) -> list[slice]:
    """Row ranges of every length, starting anywhere."""
    generator = torch.Generator().manual_seed(seed)
    starts = [
        int(torch.randint(ROWS - n + 1, (1,), generator=generator)) for n in range(1, ROWS + 1)
    ]
    return [slice(start, start + n) for n, start in enumerate(starts, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", [16, 33, 64, 80, 100, 256, 1000, 1408, 2048, 7168, 8192])
@torch.inference_mode()
def test_linear(inner: int, dtype: torch.dtype) -> None:
    matmul = choose_products(True).matmul
    torch.manual_seed(inner)
    for outer in (1, 3, 8, 31, 64, 100, 320):
        x, w, b = (torch.randn(s).to(dtype) for s in ((ROWS, inner), (outer, inner), (outer,)))
        alone = torch.cat([matmul(x[i : i + 1], w, b) for i in range(ROWS)])
        for rows in windows(outer):
            assert torch.equal(matmul(x[rows], w, b), alone[rows]), (outer, rows)
        shuffled = torch.randperm(ROWS)
        assert torch.equal(matmul(x[shuffled], w, b), alone[shuffled])
        torch.testing.assert_close(alone, linear(x, w, b), rtol=2e-2, atol=2e-3 * inner**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_batch_matmul(dtype: torch.dtype) -> None:
    product = choose_products(True).batch_matmul
    torch.manual_seed(1)
    for groups, inner, outer in ((8, 32, 64), (3, 12, 24), (16, 128, 512), (1, 64, 1), (5, 17, 9)):
        x = torch.randn(ROWS, groups, inner).to(dtype).transpose(0, 1)
        for w in (
            torch.randn(groups, inner, outer).to(dtype),
            torch.randn(groups, outer, inner).to(dtype).transpose(1, 2),
        ):
            alone = torch.cat([product(x[:, i : i + 1], w) for i in range(ROWS)], dim=1)
            for rows in windows(outer):
                assert torch.equal(product(x[:, rows], w), alone[:, rows])
            torch.testing.assert_close(alone, torch.bmm(x, w), rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_swiglu(dtype: torch.dtype) -> None:
    """Widths with and without a scalar tail."""
    unit, plain = choose_products(True).swiglu, choose_products(False).swiglu
    for width in (1, 3, 24, 64, 100, 1408):
        x = (torch.randn(ROWS, 2 * width) * 4).to(dtype)
        alone = torch.cat([unit(x[i : i + 1]) for i in range(ROWS)])
        for rows in windows(width):
            assert torch.equal(unit(x[rows]), alone[rows])
        torch.testing.assert_close(alone, plain(x), rtol=2e-2, atol=1e-3)
    extreme = torch.tensor([[-1e4, 1e4, -90.0, 1.0, 1.0, 1.0]]).to(dtype)
    assert unit(extreme).isfinite().all()


def test_no_rows() -> None:
    products = choose_products(True)
    assert products.matmul(torch.zeros(0, 32), torch.zeros(8, 32), None).shape == (0, 8)
    assert products.swiglu(torch.zeros(0, 32)).shape == (0, 16)
