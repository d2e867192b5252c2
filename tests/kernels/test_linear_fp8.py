"""A dense product in FP8 against its dequantised twin in fp32, and by weights joined of parts."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels.linear_fp8 import FEW_ROWS, linear_fp8, linear_fp8_twin
from crossdock.kernels.quant import dequantise_weights, quantise_weights
from crossdock.layers.fp8 import fp8_linear, join_fp8


def weight(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks of very different size, so that a scale in the wrong place is seen."""
    w = torch.randn(rows, width, device=device) * width**-0.5
    blocks = torch.exp2(torch.randint(-3, 4, (-(-rows // 128), width // 128), device=device))
    w *= blocks.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    codes, scales = quantise_weights(w[None])
    return codes[0], scales[0]


def close(got: Tensor, want: Tensor) -> bool:
    """To BF16's rounding and a few codes that lie halfway."""
    return bool((got.float() - want).norm() <= 0.01 * want.norm())


@pytest.mark.parametrize("rows", [1, 17, FEW_ROWS + 1, 200])
@pytest.mark.parametrize(("out", "width"), [(192, 256), (256, 384)])
def test_product_is_the_dequantised_one(device, rows: int, out: int, width: int) -> None:
    codes, scales = weight(out, width, device)
    x = (torch.randn(rows, width, device=device) * 3).bfloat16()
    got = linear_fp8(x, codes, scales)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, out)
    assert close(got, linear_fp8_twin(x, codes, scales))


def test_rows_may_be_strided_narrow_and_absent(device) -> None:
    codes, scales = weight(128, 384, device)
    wide = torch.randn(40, 900, device=device).bfloat16()
    narrow = wide[::2, 3:323]  # 320 of 384 channels
    assert close(linear_fp8(narrow, codes, scales), linear_fp8_twin(narrow, codes, scales))
    across = wide[:384].t()[:5]
    assert across.stride(1) != 1 and across.shape[1] == 40
    narrower, small = weight(64, 128, device)
    assert close(linear_fp8(across, narrower, small), linear_fp8_twin(across, narrower, small))
    assert linear_fp8(wide[:0, :384], codes, scales).shape == (0, 128)


@pytest.mark.parametrize("rows", [(256, 192), (192, 64, 128), (100,)])
def test_parts_of_any_rows_keep_their_scales(device, rows: tuple[int, ...]) -> None:
    parts = [weight(n, 256, device) for n in rows]
    joined = join_fp8(parts)
    assert len(joined.spans) == (1 if rows[0] % 128 == 0 or len(rows) == 1 else len(rows))
    x, bias = torch.randn(9, 256, device=device).bfloat16(), torch.randn(sum(rows), device=device)
    got = fp8_linear(x, joined, bias.bfloat16())
    want = torch.cat([linear_fp8_twin(x, *part) for part in parts], dim=1) + bias
    assert got.shape == want.shape and close(got, want)
    assert joined.nbytes == joined.codes.numel() + 4 * joined.scales.numel()


def test_tensors_are_multiplied_as_they_are(device) -> None:
    w = dequantise_weights(*(t[None] for t in weight(64, 128, device)))[0]
    x = torch.randn(3, 128, device=device)
    torch.testing.assert_close(fp8_linear(x, w), x @ w.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 65, 1000, 4096])
@pytest.mark.parametrize(("out", "width"), [(2112, 7168), (7168, 16384), (24576, 1536)])
def test_compiled_at_real_sizes(rows: int, out: int, width: int) -> None:
    device = torch.device("cuda")
    codes, scales = weight(out, width, device)
    x = torch.randn(rows, width, device=device).bfloat16()
    assert close(linear_fp8(x, codes, scales), linear_fp8_twin(x, codes, scales))
