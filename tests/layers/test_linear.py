"""The fast products against torch's own."""

import pytest
import torch

from crossdock.layers import choose_products
from crossdock.layers.linear import padded_rows


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 33, 200])
@torch.inference_mode()
def test_cpu_float32_linear(rows: int) -> None:
    matmul = choose_products(False, torch.device("cpu"), torch.float32).matmul
    for inner, outer in ((1, 1), (7, 3), (48, 100), (256, 512)):
        x, w, b = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer)
        torch.testing.assert_close(matmul(x, w, b), x @ w.t() + b, rtol=1e-4, atol=1e-4)
        wide = torch.randn(rows, inner + 5)  # rows cut out of a wider tensor
        cut = wide[:, 2 : 2 + inner]
        torch.testing.assert_close(matmul(cut, w, None), cut @ w.t(), rtol=1e-4, atol=1e-4)


def test_onednn_meets_few_numbers_of_rows() -> None:
    """Each costs memory that is never given back."""
    padded = [padded_rows(rows) for rows in range(1, 4097)]
    assert all(p >= rows for rows, p in enumerate(padded, 1))
    assert padded[:32] == list(range(1, 33)) and len(set(padded)) <= 110


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("invariant", [True, pytest.param(False, marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_logits_on_gpus_are_not_rounded_to_16_bits(invariant: bool, dtype: torch.dtype) -> None:
    """Tokens whose logits are rounded to one value are a tie that the model did not make."""
    logits = choose_products(invariant, torch.device("cuda"), dtype).logits
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there in the interpreter
    x, w = (torch.randn(n, 96, device=device).to(dtype) for n in (5, 70))
    exact = (x.double() @ w.double().t()).float()
    torch.testing.assert_close(logits(x, w, None), exact, rtol=1e-5, atol=1e-4)
    out = torch.full_like(exact, float("nan"))
    assert logits(x, w, out) is out
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-4)
