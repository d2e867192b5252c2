"""Casts in kernels against their torch twins, bit by bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crossdock.kernels.rounding import dequantise_blocks_torch, quantise_blocks_torch

SCRIPT = Path(__file__).with_name("cast_rows.py")


def rows():
    """Of all magnitudes, with zeros, ties of both formats, a block of zeros, NaN and infinity."""
    x = torch.randn(24, 384) * torch.logspace(-6, 6, 24)[:, None]
    x[0, :128] = 0
    x[1, :128] = torch.arange(128) * 3.5  # the largest, 444.5, gives a scale near 1
    x[2, :128] = torch.arange(128) / 2048  # E4M3's subnormals and their ties
    x[2, 127] = 448
    bits = torch.randint(0, 1 << 30, (384,), dtype=torch.int32) & ~0xFFFF | 0x8000
    x[3] = (bits & 0x4FFFFFFF).view(torch.float32)  # halfway between two BF16
    x[4, 5] = x[5, :128] = float("nan")
    x[5, 300] = float("inf")
    return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_round_as_torch_does(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = rows()
    torch.save(x, tmp_path / "in")
    env = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "in"), str(tmp_path / "out"), device]
    subprocess.run(command, env=env, check=True, timeout=120)
    narrow, q, scales = torch.load(tmp_path / "out")
    finite = x.isfinite()
    assert torch.equal(narrow.view(torch.int16)[finite], x.bfloat16().view(torch.int16)[finite])
    want_q, want_scales = quantise_blocks_torch(x)
    assert torch.equal(scales, want_scales)
    codes = q.view(torch.float8_e4m3fn)
    assert torch.equal(codes.isnan(), want_q.isnan())  # whose sign says nothing
    assert torch.equal(q[~codes.isnan()], want_q.view(torch.uint8)[~codes.isnan()])


def test_what_is_not_finite_stays_so():
    x = rows()
    back = dequantise_blocks_torch(*quantise_blocks_torch(x), torch.float32)
    assert back[x.isnan()].isnan().all() and not back[5, 300].isfinite()
    broken = (x.isinf().unflatten(-1, (-1, 128)).any(-1)).repeat_interleave(128, -1)
    assert back[~x.isnan() & ~broken].isfinite().all()  # NaN breaks no neighbour


def test_a_block_keeps_its_values_to_one_part_in_sixteen():
    x = rows()[6:]
    back = dequantise_blocks_torch(*quantise_blocks_torch(x), torch.float32)
    largest = x.unflatten(-1, (-1, 128)).abs().amax(-1).repeat_interleave(128, -1)
    assert ((back - x).abs() <= x.abs() / 16 + largest / 448 / 512 * 1.01).all()
