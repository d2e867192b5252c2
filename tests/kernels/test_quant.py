"""FP8 block quantisation and SwiGLU against their torch twins, on fresh data."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import quant
from crossdock.kernels.rounding import quantise_blocks_torch


def spread(*shape: int, device: torch.device) -> Tensor:
    """Magnitudes over many octaves, with a block of zeros and one outlier."""
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-8, 8, shape, device=device))
    flat = x.view(-1, shape[-1])
    flat[0, :128] = 0
    flat[-1, 5] = 3e4
    return x.bfloat16()


def assert_same_codes(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)
    codes_differ = got[0].view(torch.uint8) != want[0].view(torch.uint8)
    # A reciprocal that differs in its last bit may move a value that lies halfway.
    assert codes_differ.float().mean() < 1e-3
    step = (got[0].float() - want[0].float()).abs() / want[0].float().abs().clamp_min(2**-6)
    assert step.max() <= 0.126


@pytest.mark.parametrize("rows", [1, 37])
def test_rows_match_the_twin(device: torch.device, rows: int) -> None:
    x = spread(rows, 384, device=device)
    got = quant.quantise_rows(x)
    assert_same_codes(got, quantise_blocks_torch(x))
    error = (quant.dequantise_rows(*got) - x.float()).abs()
    amax = x.float().abs().view(rows, 3, 128).amax(-1).repeat_interleave(128, -1)
    assert (error <= (x.float().abs() / 16 + amax / 448 * 2**-9)).all()


def test_rows_may_be_strided_and_absent(device: torch.device) -> None:
    x = spread(9, 512, device=device)
    assert_same_codes(quant.quantise_rows(x[:, :256]), quantise_blocks_torch(x[:, :256]))
    q, scale = quant.quantise_rows(x[:0])
    assert q.shape == (0, 512) and scale.shape == (0, 4)
    with pytest.raises(ValueError, match="multiple of 128; got 130"):
        quant.swiglu_quantise_masked(x[:, None, :260], torch.ones(9, dtype=torch.int32))


def test_rows_are_padded(device: torch.device) -> None:
    x = spread(9, 512, device=device)
    q, scale = quant.quantise_rows(x[:, :130], align=128)
    assert q.shape == (128, 256) and scale.shape == (128, 2)
    padded = torch.nn.functional.pad(x[:, :130], (0, 126))
    assert_same_codes((q[:9], scale[:9]), quantise_blocks_torch(padded))


@pytest.mark.parametrize("out", [256, 200])
def test_weights_come_back_within_half_a_step(device: torch.device, out: int) -> None:
    w = spread(3, out, 256, device=device)
    q, scale = quant.quantise_weights(w)
    assert q.shape == w.shape and scale.shape == (3, 2, 2)
    error = (quant.dequantise_weights(q, scale) - w.float()).abs()
    step = scale.repeat_interleave(128, 1)[:, :out].repeat_interleave(128, 2)
    assert (error <= w.float().abs() / 16 + step * 2**-9).all()
    largest = (q.float().abs()[:, :128, :128]).amax((1, 2))
    assert (largest == 448).sum() >= 2  # the block's own largest value uses the whole range


def test_grouped_swiglu_matches_and_stops_at_the_rows_in_use(device: torch.device) -> None:
    x = spread(70, 512, device=device)
    end = torch.tensor([45], dtype=torch.int32, device=device)
    got = quant.swiglu_quantise(x, end)
    want = quant.swiglu_quantise_twin(x)
    assert_same_codes((got[0][:45], got[1][:45]), (want[0][:45], want[1][:45]))


def test_masked_swiglu_matches_for_every_count(device: torch.device) -> None:
    counts = [0, 1, 17, 40]
    x = spread(4, 40, 256, device=device)
    x[torch.arange(40) >= torch.tensor(counts)[:, None]] = float("nan")
    got = quant.swiglu_quantise_masked(x, torch.tensor(counts, dtype=torch.int32, device=device))
    for slot, count in enumerate(counts):
        want = quant.swiglu_quantise_twin(x[slot, :count])
        if count:
            assert_same_codes((got[0][slot, :count], got[1][slot, :count]), want)
