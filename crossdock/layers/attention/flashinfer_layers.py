"""Attention on FlashInfer's kernels where the plan says so, else on Triton's."""

import torch
from torch import Tensor

from crossdock.core import CapacityError
from crossdock.layers.attention.flashinfer_plan import FlashDecodes, FlashPrompts
from crossdock.layers.attention.paged_gqa import PagedGQAttention
from crossdock.layers.attention.paged_mla import PagedMLAttention
from crossdock.layers.attention.paged_plan import Decodes, PagedPlan, Prompts

_ADDRESSABLE = 1 << 32
"""Values of a layer's latent cache: the MLA kernel multiplies pages with their width in 32 bits."""


class FlashInferGQAttention(PagedGQAttention):
    def _prefill(
        self, q_ThD: Tensor, cache: tuple[Tensor, ...], p: Prompts, plan: PagedPlan
    ) -> Tensor:
        if not isinstance(p, FlashPrompts):
            return super()._prefill(q_ThD, cache, p, plan)
        k, v = (x.view(-1, plan.page_size, *x.shape[1:]) for x in cache)
        return p.run(q_ThD, (k, v), out=torch.empty_like(q_ThD))


class FlashInferMLAttention(PagedMLAttention):
    def _attend(
        self, q_BhL: Tensor, q_BhR: Tensor, cache: tuple[Tensor, ...], d: Decodes, page: int
    ) -> Tensor:
        if not isinstance(d, FlashDecodes):
            return super()._attend(q_BhL, q_BhR, cache, d, page)
        rows_SC = cache[0]
        if rows_SC.numel() > _ADDRESSABLE:
            most = _ADDRESSABLE // rows_SC.shape[1]
            raise CapacityError(
                f'attention "flashinfer" reads at most {most:,} tokens of latent cache, and there '
                f"are {len(rows_SC):,}; set kv_memory_gib or max_model_len lower, or attention = "
                '"triton"'
            )
        pages = rows_SC.view(-1, page, rows_SC.shape[1])
        latents, keys = pages.split((self.spec.kv_lora_rank, self.spec.qk_rope_head_dim), dim=-1)
        return d.run(q_BhL, q_BhR, latents, keys)
