"""Inputs of captured decode steps: the kernel against its twin."""

import pytest
import torch

from crossdock.kernels.decode_inputs import DecodeInputs, load_decodes, load_decodes_twin

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(n: int, width: int, drawn: bool) -> tuple:
    ints = lambda *shape: torch.randint(1, 1 << 40, shape, device=DEVICE)  # noqa: E731
    tokens = ints(n)
    where = None
    if drawn:
        tokens[torch.rand(n, device=DEVICE) < 0.5] = -1
        where = torch.randint(0, 9, (n,), device=DEVICE)
    lens = torch.randint(1, 999, (n,), dtype=torch.int32, device=DEVICE)
    return tokens, ints(n), ints(n), ints(n), lens, ints(n, width), where, ints(9)


@pytest.mark.parametrize("n,width,drawn", [(0, 1, False), (3, 2, True), (8, 200, True), (5, 7, 0)])
def test_rows_match_the_twin(n, width, drawn):
    ours, theirs = (DecodeInputs.empty(11, 210, DEVICE) for _ in range(2))
    for buffers in (ours, theirs):
        for tensor in vars(buffers).values():
            tensor.fill_(77)  # of a step before
    given = draw(n, width, bool(drawn))
    load_decodes(ours, 8, *given)
    load_decodes_twin(theirs, 8, *given)
    for name, tensor in vars(ours).items():
        assert torch.equal(tensor, getattr(theirs, name)), name
    assert ours.rows_3.tolist() == [n, min(n, 4), max(n - 4, 0)]
    assert (ours.tokens_B[8:] == 77).all()


def test_what_does_not_fit_is_refused():
    buffers = DecodeInputs.empty(4, 3, DEVICE)
    with pytest.raises(ValueError, match="5 decodes of 2 pages in 4 rows"):
        load_decodes(buffers, 4, *draw(5, 2, False))
    with pytest.raises(ValueError, match="fit buffers for 4 decodes of 3 pages"):
        load_decodes(buffers, 4, *draw(2, 4, False))
