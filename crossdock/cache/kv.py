"""The KV cache of one rank. Knows pages and slots, neither sequences nor prefixes."""

import math

import numpy as np
import torch
from torch import Tensor

from crossdock.core import GQASpec, MLASpec

FP8 = torch.float8_e4m3fn
"""A cache of this dtype has scales beside it."""


def page_bytes(
    attention: GQASpec | MLASpec, num_layers: int, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one page over all layers, scales included."""
    scales = 4 * attention.kv_scales if dtype == FP8 else 0
    return num_layers * page_size * (attention.kv_width * dtype.itemsize + scales)


class KVCache:
    """`core.KV`: slot `page * page_size + offset` of each layer holds one token.

    GQA layers are `(k, v)`, each [slots, kv heads, D]; MLA layers one latent
    [slots, kv_lora_rank + qk_rope_head_dim], normed latent first, rotated key after it. Where
    `dtype` is FP8, fp32 scales follow, value = code * scale: [slots, kv heads] of k and as many of
    v, or [slots, 2] of latent and rotated key. Starts zeroed: rows that are masked must still be
    finite.
    """

    def __init__(
        self,
        attention: GQASpec | MLASpec,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        slots = num_pages * page_size
        if isinstance(attention, MLASpec):
            shapes: list[tuple[int, ...]] = [(slots, attention.kv_width)]
            scales: list[tuple[int, ...]] = [(slots, 2)]
        else:
            shapes = [(slots, attention.num_kv_heads, attention.head_dim)] * 2
            scales = [(slots, attention.num_kv_heads)] * 2
        made = [(shape, dtype) for shape in shapes]
        if dtype == FP8:
            made += [(shape, torch.float32) for shape in scales]
        self.page_size = page_size
        self.num_pages = num_pages
        self._layers: list[tuple[Tensor, ...]] = [
            tuple(_zeros(shape, kind, torch.device(device)) for shape, kind in made)
            for _ in range(num_layers)
        ]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        return self._layers[index]

    def clear(self, pages: int) -> None:
        """Zeroes the first `pages` pages."""
        for layer in self._layers:
            for tensor in layer:
                tensor[: pages * self.page_size].zero_()

    @property
    def num_tokens(self) -> int:
        """Tokens the cache has room for."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self._layers for t in layer)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from the system's zero pages, so that memory is taken as pages are used
    (torch.zeros would write, and so take, all of it)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
