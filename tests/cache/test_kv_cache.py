"""Shapes and sizes of the KV pages."""

import pytest
import torch

from crossdock.cache import KVCache, page_bytes
from crossdock.cache.kv import FP8
from crossdock.core import GQASpec, MLASpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("attention", "shapes"),
    [
        (GQASpec(8, 2, 16), [(40, 2, 16), (40, 2, 16)]),
        (MLASpec(8, None, 24, 16, 8, 12), [(40, 32)]),
    ],
)
def test_layers_and_bytes(attention, shapes, dtype: torch.dtype) -> None:
    kv = KVCache(attention, 3, 10, 4, dtype, "cpu")
    assert [tuple(t.shape) for t in kv.layer(2)] == shapes
    assert all(t.dtype == dtype for t in kv.layer(0))
    assert kv.num_tokens == 40
    assert kv.nbytes == 10 * page_bytes(attention, 3, 4, dtype)
    kv.layer(0)[0].fill_(1)
    assert not kv.layer(1)[0].any()


@pytest.mark.parametrize(
    ("attention", "codes", "scales"),
    [
        (GQASpec(8, 2, 16), [(40, 2, 16), (40, 2, 16)], [(40, 2), (40, 2)]),
        (MLASpec(8, None, 24, 16, 8, 12), [(40, 32)], [(40, 2)]),
    ],
)
def test_an_fp8_cache_has_scales(attention, codes, scales) -> None:
    kv = KVCache(attention, 3, 10, 4, FP8, "cpu")
    layer = kv.layer(1)
    assert [tuple(t.shape) for t in layer] == codes + scales
    assert [t.dtype for t in layer] == [FP8] * len(codes) + [torch.float32] * len(scales)
    assert kv.nbytes == 10 * page_bytes(attention, 3, 4, FP8)
    for tensor in layer:
        tensor.copy_(torch.ones(tensor.shape))
    kv.clear(9)
    for tensor in layer:
        assert (tensor[:36].float() == 0).all() and (tensor[36:].float() == 1).all()
