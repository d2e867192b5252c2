"""Experts by kernels of fixed tiles against the same experts slot by slot."""

import pytest
import torch

from crossdock.core import Rows
from crossdock.layers import choose_products
from crossdock.moe.context import MoEWeights
from crossdock.moe.experts.rows import FixedTiles, RowExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_as_float64_would_have_them(dtype: torch.dtype) -> None:
    """Rows without a slot, slots without a row, and pieces."""
    torch.manual_seed(1)
    N, K, S, H, F = 83, 3, 7, 40, 24
    x, gate_up, down = (
        (torch.randn(*s, device=DEVICE) * s[-1] ** -0.5).to(dtype)
        for s in ((N, H), (S, 2 * F, H), (S, H, F))
    )
    slots = torch.randint(-1, S - 1, (N, K), device=DEVICE)
    rows_S = torch.zeros(S, dtype=torch.int64, device=DEVICE)
    weights = MoEWeights(torch.empty(0), None, gate_up, down)
    for at_once in (N, 30):
        experts = RowExperts(FixedTiles(weights), True, at_once, rows_S.zero_())
        got = experts(Rows(x, slots, torch.rand(N, K, device=DEVICE)))
        assert torch.equal(rows_S, slots[slots >= 0].bincount(minlength=S))
        h = torch.einsum("nh,nkfh->nkf", x.double(), gate_up.double()[slots])
        gate, up = h.chunk(2, -1)
        want = torch.einsum("nkf,nkhf->nkh", gate.sigmoid() * gate * up, down.double()[slots])
        chosen = slots >= 0
        error = (got.double() - want)[chosen].norm() / want[chosen].norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2)
    none = experts(Rows(x[:0], slots[:0], torch.rand(0, K, device=DEVICE)))
    assert none.shape == (0, K, H)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_is_the_same_row(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    N, K, S, H, F = 200, 8, 64, 2048, 768
    x, gate_up, down = (
        (torch.randn(*s, device=DEVICE) * s[-1] ** -0.5).to(dtype)
        for s in ((N, H), (S, 2 * F, H), (S, H, F))
    )
    slots = torch.rand(N, S, device=DEVICE).topk(K).indices
    rows_S = torch.zeros(S, dtype=torch.int64, device=DEVICE)
    experts = RowExperts(
        FixedTiles(MoEWeights(torch.empty(0), None, gate_up, down)), True, N, rows_S
    )
    weights = torch.rand(N, K, device=DEVICE)
    run = lambda part: experts(Rows(x[part], slots[part], weights[part]))  # noqa: E731
    alone = torch.cat([run(slice(i, i + 1)) for i in range(N)])
    assert choose_products(True, DEVICE).invariant
    for n in (1, 2, 3, 17, 64, 65, 128, 199, 200):
        start = (11 * n) % (N - n + 1)
        assert torch.equal(run(slice(start, start + n)), alone[start : start + n]), n
