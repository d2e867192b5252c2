"""Softmax and running sums of rows against torch in float64; on GPUs also bit by bit."""

import pytest
import torch

from crossdock.kernels.rows import cumsum_rows, softmax_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERATIONS = {
    "softmax": softmax_rows,
    "log_softmax": lambda x: softmax_rows(x, log=True),
    "cumsum": cumsum_rows,
}
WANTED = {
    "softmax": lambda x: x.double().softmax(-1),
    "log_softmax": lambda x: x.double().log_softmax(-1),
    "cumsum": lambda x: x.double().cumsum(-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", [1, 101, 2048, 5003])
def test_rows_against_float64(name: str, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(3, width, device=DEVICE) * 8
    x[1, 1:] = -torch.inf if name != "cumsum" else 0.0
    got = OPERATIONS[name](x)
    assert got.dtype == (torch.float64 if name == "cumsum" else torch.float32)
    torch.testing.assert_close(got.double(), WANTED[name](x), rtol=2e-5, atol=2e-6)
    assert OPERATIONS[name](x[:0]).shape == (0, width)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", [101, 4097, 32000, 151936])
def test_a_row_alone_is_the_same_row(name: str, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(70, width, device=DEVICE) * 4
    alone = torch.cat([OPERATIONS[name](x[i : i + 1]) for i in range(len(x))])
    for n in range(1, len(x) + 1):
        start = (7 * n) % (len(x) - n + 1)
        assert torch.equal(OPERATIONS[name](x[start : start + n]), alone[start : start + n])
