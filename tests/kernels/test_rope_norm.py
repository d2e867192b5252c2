"""Norm with residual, and norm, rope and cache write in one pass, against their torch twins."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import rms_norm, rope

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 200])
def test_norm_with_residual(device, width, dtype):
    x = torch.randn(5, width + 8, device=device, dtype=dtype)[:, :width]
    residual = torch.randn(5, width, device=device, dtype=dtype) * 3
    weight = torch.rand(width, device=device, dtype=dtype) + 0.5
    got, total = rms_norm.add_rms_norm(x, residual, weight, 1e-6)
    want, want_total = rms_norm.add_rms_norm_twin(x, residual, weight, 1e-6)
    assert torch.equal(total, want_total)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])
    plain = rms_norm.rms_norm(total, weight, 1e-6)
    assert torch.equal(plain, got)


def tables(positions: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angle = torch.rand(positions, dim // 2, device=device) * 6
    return (
        torch.cat((angle.cos(), angle.cos()), 1),
        torch.cat((-angle.sin(), angle.sin()), 1),
    )


def assert_same_cache(got: Tensor, want: Tensor) -> None:
    if got.dtype != torch.float8_e4m3fn:
        tolerance = TOLERANCE.get(got.dtype, TOLERANCE[torch.float32])
        torch.testing.assert_close(got, want, **tolerance)
        return
    off = got.view(torch.uint8) != want.view(torch.uint8)
    assert off.float().mean() < 0.01  # the last bit of a value in between may round either way
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=2**-8)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("norm", "clip"), [("none", None), ("head", None), ("full", 1.5)])
def test_gqa(device, norm, clip, cache_dtype):
    T, h, G, D, S = 6, 6, 2, 16, 20
    dtype = torch.bfloat16 if cache_dtype == torch.bfloat16 else torch.float32
    qkv = torch.randn(T, (h + 2 * G) * D + 8, device=device, dtype=dtype)[:, : (h + 2 * G) * D]
    sizes = {"none": None, "head": (D, D), "full": (h * D, G * D)}[norm]
    norms = sizes and tuple(torch.rand(n, device=device, dtype=dtype) + 0.5 for n in sizes)
    cos, sin = tables(50, D, device)
    positions = torch.randint(0, 50, (T,), device=device)
    slots = torch.randperm(S, device=device)[:T]
    slots[2] = -1
    caches = []
    for write in (rope.gqa_norm_rope_write, rope.gqa_norm_rope_write_twin):
        cache = [torch.full((S, G, D), 7.0, device=device).to(cache_dtype) for _ in range(2)]
        if cache_dtype == torch.float8_e4m3fn:
            cache += [torch.full((S, G), 7.0, device=device) for _ in range(2)]
        q = write(qkv, norms, norm == "full", 1e-6, clip, cos, sin, positions, slots, tuple(cache))
        caches.append((q, *cache))
    for got, want in zip(*caches, strict=True):
        assert_same_cache(got, want)
    free = torch.ones(S, dtype=torch.bool, device=device).index_fill(0, slots[slots >= 0], False)
    assert (caches[0][1][free].float() == 7).all()  # nothing else was written


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_mla(device, cache_dtype):
    T, h, L, R, S = 5, 3, 48, 8, 20
    dtype = torch.bfloat16 if cache_dtype == torch.bfloat16 else torch.float32
    q = torch.randn(T, h, 24 + R, device=device, dtype=dtype)[..., 24:]
    kv = torch.randn(T, 16 + L + R, device=device, dtype=dtype)[:, 16:]
    norm = torch.rand(L, device=device, dtype=dtype) + 0.5
    cos, sin = tables(50, R, device)
    positions = torch.randint(0, 50, (T,), device=device)
    slots = torch.randperm(S, device=device)[:T]
    slots[0] = -1
    caches = []
    for write in (rope.mla_norm_rope_write, rope.mla_norm_rope_write_twin):
        cache = [torch.full((S, L + R), 7.0, device=device).to(cache_dtype)]
        if cache_dtype == torch.float8_e4m3fn:
            cache.append(torch.full((S, 2), 7.0, device=device))
        out = write(q, kv, norm, 1e-6, cos, sin, positions, slots, tuple(cache))
        caches.append((out, *cache))
    for got, want in zip(*caches, strict=True):
        assert_same_cache(got, want)
    free = torch.ones(S, dtype=torch.bool, device=device).index_fill(0, slots[slots >= 0], False)
    assert (caches[0][1][free].float() == 7).all()
