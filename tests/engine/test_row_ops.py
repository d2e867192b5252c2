"""Operations along the vocabulary: like torch's, with ties to the lowest id, and a row's own."""

import pytest
import torch

from crossdock.engine.row_ops import row_ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lowest_id(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 500, device=device).mul_(2).round_().div_(2)
    x[0] = 1.0
    x[1] = torch.where(torch.arange(500, device=device) % 7 == 0, 3.0, -torch.inf)
    for k in (1, 5, 60):
        values, ids = row_ops(x.device).topk(x, k)
        order = x.cpu().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(ids.cpu(), order.indices[:, :k])
        assert torch.equal(values.cpu(), order.values[:, :k])


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_alone_is_the_same_row(device: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(33, 4099, device=device) * 3
    ops = row_ops(x.device)
    torch.testing.assert_close(ops.softmax(x), x.softmax(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ops.log_softmax(x), x.log_softmax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.cumsum(x), x.double().cumsum(-1), rtol=1e-9, atol=1e-9)
    for name in ("softmax", "log_softmax", "cumsum"):
        op = getattr(ops, name)
        whole = op(x)
        for i in range(len(x)):
            assert torch.equal(op(x[i : i + 1])[0], whole[i]), (name, i)
            assert torch.equal(op(x[i : i + 3])[0], whole[i]), (name, i)
