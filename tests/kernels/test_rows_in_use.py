"""SwiGLU, gathering and the sums of waves over rows whose number the device alone knows."""

import pytest
import torch

from crossdock.kernels.grouped_gemm_gather import gather_rows, gather_rows_twin
from crossdock.kernels.swiglu import swiglu_rows, swiglu_twin
from crossdock.kernels.wave_sum import add_wave, add_wave_twin


@pytest.mark.parametrize("width", [128, 600])
@pytest.mark.parametrize("used", [0, 5, 9])
def test_swiglu_stops_at_the_rows_in_use(device: torch.device, width: int, used: int) -> None:
    x = torch.randn(9, 2 * width, device=device).bfloat16()
    end = torch.tensor([used], dtype=torch.int32, device=device)
    got = swiglu_rows(x, end)[:used].float()
    torch.testing.assert_close(got, swiglu_twin(x)[:used].float(), rtol=2**-7, atol=1e-6)
    every = swiglu_rows(x).float()
    torch.testing.assert_close(every, swiglu_twin(x).float(), rtol=2**-7, atol=1e-6)


def test_rows_without_scales_are_gathered(device: torch.device) -> None:
    x = torch.randn(20, 384, device=device).bfloat16()
    index = torch.randint(-1, 20, (50,), dtype=torch.int32, device=device)
    end = torch.tensor([41], dtype=torch.int32, device=device)
    (got, none), (want, _) = gather_rows(x, None, index, end), gather_rows_twin(x, None, index)
    assert none is None and torch.equal(got[:41], want[:41])


def test_waves_add_up(device: torch.device) -> None:
    places = torch.randperm(24, device=device)[:21].int()
    places[torch.rand(21, device=device) < 0.3] = -1
    places_NK, weights_NK = places.view(7, 3), torch.rand(7, 3, device=device)
    y = torch.randn(24, 1100, device=device).bfloat16()
    got, want = (torch.full((7, 1100), float("nan"), device=device) for _ in range(2))
    for first in (0, 10, 20):
        piece = y[first : first + 10]
        add_wave(got, piece, places_NK, weights_NK, first, first == 0)
        add_wave_twin(want, piece, places_NK, weights_NK, first, first == 0)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
