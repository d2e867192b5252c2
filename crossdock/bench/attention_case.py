"""What a shape of `bench attention` works on, drawn at random, and the float32 reference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crossdock.bench.attention import HEAD, LATENT, ROTATED, Shape
from crossdock.core import ForwardBatch
from crossdock.kernels.attention_gqa import decode_gqa_twin
from crossdock.kernels.attention_mla import decode_mla_twin
from crossdock.kernels.attention_prefill import causal_twin, prefill_gqa_twin
from crossdock.layers.attention.cached import write_rows


@dataclass(frozen=True, eq=False)
class Given:
    """q: queries [T, h, D]; of MLA those over the latents, or of a head, and the rotated ones.
    cache: k, v [slots, g, D] or latents [slots, L + R], in FP8 with scales, as of a layer's
    `KVCache`; for prompts of MLA expanded k, v [N, h, D] and rotated keys [N, R]."""

    shape: Shape
    page_size: int
    batch: ForwardBatch
    q: tuple[Tensor, ...]
    cache: tuple[Tensor, ...]
    scale: float

    @property
    def device(self) -> torch.device:
        return self.q[0].device

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Empty without FP8."""
        return self.cache[len(self.cache) // 2 :] if self.cache[0].element_size() == 1 else ()


def draw(shape: Shape, page_size: int, device: torch.device) -> Given:
    """In BF16."""

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    batch, slots = _batch(shape, page_size, device)
    T, h, g = batch.num_tokens, shape.heads, shape.kv_heads
    if g:
        cache: tuple[Tensor, ...] = (randn(slots, g, HEAD), randn(slots, g, HEAD))
        return Given(shape, page_size, batch, (randn(T, h, HEAD),), cache, HEAD**-0.5)
    scale = (HEAD + ROTATED) ** -0.5
    if shape.rows == "prompt":
        cache = (randn(T, h, HEAD), randn(T, h, HEAD), randn(T, ROTATED))
        return Given(
            shape, page_size, batch, (randn(T, h, HEAD), randn(T, h, ROTATED)), cache, scale
        )
    # Of the variance that a head's queries have behind the absorbed projection.
    q_ThL = randn(h, T, LATENT).transpose(0, 1) * (HEAD / LATENT) ** 0.5
    cache = (randn(slots, LATENT + ROTATED),)
    return Given(shape, page_size, batch, (q_ThL, randn(T, h, ROTATED)), cache, scale)


def _batch(shape: Shape, page_size: int, device: torch.device) -> tuple[ForwardBatch, int]:
    """All sequences alike, their pages in random order; and how many slots there are."""
    B, length, decodes = shape.sequences, shape.length, shape.rows == "decode"
    pages, rows = -(-length // page_size), 1 if decodes else length
    zeros_T = torch.zeros(B * rows, dtype=torch.int64, device=device)
    starts_B1 = torch.arange(B + 1, dtype=torch.int32, device=device) * length
    batch = ForwardBatch(
        zeros_T,
        zeros_T,
        zeros_T,
        zeros_T,
        query_lens=(rows,) * B,
        kv_lens=(length,) * B,
        page_table_BP=torch.randperm(B * pages, device=device).view(B, pages),
        sample_rows=zeros_T[:0],
        num_decodes=B if decodes else 0,
        kv_lens_B=torch.full((B,), length, dtype=torch.int32, device=device),
        prefill_starts_B1=None if decodes else starts_B1,
    )
    return batch, B * pages * page_size


def quantised(given: Given) -> Given:
    """With the cache in E4M3, as steps write it."""
    slots = len(given.cache[0])
    at_S = torch.arange(slots, device=given.device)
    codes = [torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in given.cache]
    if given.shape.kv_heads:
        scales = [torch.empty(x.shape[:2], device=given.device) for x in given.cache]
        for rows, scale, x in zip(codes, scales, given.cache, strict=True):
            write_rows(rows, scale, at_S, x)
    else:
        scales = [torch.empty(slots, 2, device=given.device)]
        for i, part in enumerate((slice(LATENT), slice(LATENT, None))):
            write_rows(codes[0][:, part], scales[0][:, i], at_S, given.cache[0][:, part])
    return replace(given, cache=(*codes, *scales))


def reference(given: Given) -> Tensor:
    """float32."""
    batch, q, scale, page = given.batch, given.q, given.scale, given.page_size
    table_BP, lens_B = batch.page_table_BP, batch.kv_lens_B
    starts_B1 = batch.prefill_starts_B1
    if starts_B1 is None and given.shape.kv_heads:
        k, v = given.cache
        return decode_gqa_twin(q[0], k, v, table_BP, lens_B, scale, page)
    if starts_B1 is None:
        return decode_mla_twin(q[0], q[1], given.cache[0], table_BP, lens_B, scale, page)
    if given.shape.kv_heads:
        k, v = given.cache
        return prefill_gqa_twin(q[0], k, v, table_BP, starts_B1, lens_B, scale, page)
    k, v, k_NR = given.cache
    k = torch.cat((k, k_NR[:, None].expand(-1, k.shape[1], -1)), dim=-1)
    each = zip(*(x.split(given.shape.length) for x in (torch.cat(q, dim=-1), k, v)), strict=True)
    return torch.cat([causal_twin(q, k, v, scale) for q, k, v in each])
