"""Grouped-query attention on Triton kernels; `gqa.py` is its torch form."""

import torch
from torch import Tensor

from crossdock.core import GQASpec, Group
from crossdock.kernels.attention_gather import gather_keys
from crossdock.kernels.attention_gqa import decode_gqa
from crossdock.kernels.attention_prefill import prefill_gathered, prefill_gqa
from crossdock.kernels.rope import gqa_norm_rope_write
from crossdock.layers.attention.gqa import GQAWeights
from crossdock.layers.attention.paged_plan import (
    Decodes,
    PagedDecode,
    PagedPlan,
    PagedPrefill,
    Prompts,
    Turn,
)
from crossdock.layers.linear import Products

GATHERED_BYTES = 1 << 28
"""Of keys and values at once; where there are more, the heads go in several turns."""


class PagedGQAttention:
    def __init__(
        self, spec: GQASpec, weights: GQAWeights, eps: float, products: Products, group: Group
    ):
        self.spec, self.w, self.products, self.group = spec, weights, products, group
        self.eps, self.scale = eps, spec.head_dim**-0.5
        self.norms: tuple[Tensor, Tensor] | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self.norms = (weights.q_norm, weights.k_norm)

    def __call__(self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: PagedPlan) -> Tensor:
        """[T, H] to [t, H]; first writes the rows' keys and values to `cache`: k, v [S, g, D],
        and for E4M3 their scales [S, g]."""
        qkv_TC = self.products.matmul(x_TH, self.w.qkv, self.w.qkv_bias)
        q_ThD = gqa_norm_rope_write(
            qkv_TC, self.norms, self.spec.qk_norm == "full", self.eps, self.spec.clip_qkv,
            plan.cos_PD, plan.sin_PD, plan.positions_T, plan.slots_T, cache,
        )  # fmt: skip
        decoded = prefilled = None
        if plan.decode is not None:
            decoded = self._decode(q_ThD[: plan.decode.count], cache, plan.decode, plan)
        if plan.prefill is not None:
            prefilled = self._prefill(q_ThD[plan.prefill.start :], cache, plan.prefill, plan)
        out_ThD = plan.join(decoded, prefilled)
        out_TH = self.products.matmul(out_ThD.flatten(1), self.w.out, self.w.out_bias)
        return self.group.reduce_scatter(out_TH)

    def _decode(
        self, q_BhD: Tensor, cache: tuple[Tensor, ...], d: Decodes, plan: PagedPlan
    ) -> Tensor:
        """[B, h, D]."""
        assert isinstance(d, PagedDecode)
        k, v, scales = _parts(cache)
        return decode_gqa(
            q_BhD, k, v, d.table_BP, d.lens_B, d.split, self.scale, plan.page_size,
            plan.window, scales,
        )  # fmt: skip

    def _prefill(
        self, q_ThD: Tensor, cache: tuple[Tensor, ...], p: Prompts, plan: PagedPlan
    ) -> Tensor:
        """[T, h, D]."""
        assert isinstance(p, PagedPrefill)
        return attend_prompts(q_ThD, cache, p, self.scale, plan.page_size, plan.window)


def attend_prompts(
    q_ThD: Tensor,
    cache: tuple[Tensor, ...],
    p: PagedPrefill,
    scale: float,
    page_size: int,
    window: int | None,
) -> Tensor:
    """[T, h, D]."""
    parts = [_attend(q_ThD[turn.rows], cache, turn, scale, page_size, window) for turn in p.turns]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    q_ThD: Tensor,
    cache: tuple[Tensor, ...],
    p: Turn,
    scale: float,
    page_size: int,
    window: int | None,
) -> Tensor:
    """Keys and values of an FP8 cache are gathered first, all or some heads of them."""
    k, v, scales = _parts(cache)
    if scales is None:
        return prefill_gqa(
            q_ThD, k, v, p.table_BP, p.cu_q_B1, p.lens_B, p.split, scale, page_size, window
        )
    assert p.slots_N is not None and p.cu_k_B1 is not None
    (_, kv_heads, D), group = k.shape, q_ThD.shape[1] // k.shape[1]
    head_bytes = len(p.slots_N) * 2 * D * q_ThD.element_size()
    step = max(1, min(kv_heads, GATHERED_BYTES // max(head_bytes, 1)))
    parts = []
    for g in range(0, kv_heads, step):
        k_SgD, v_SgD, *some = (x[:, g : g + step] for x in (k, v, *scales))
        k_NgD, v_NgD = gather_keys(k_SgD, v_SgD, (some[0], some[1]), p.slots_N, p.cu_k_B1,
                                   q_ThD.dtype)  # fmt: skip
        parts.append(
            prefill_gathered(q_ThD[:, g * group : (g + step) * group], k_NgD, v_NgD, p.cu_q_B1,
                             p.cu_k_B1, p.lens_B, p.split, scale, window)
        )  # fmt: skip
        del k_NgD, v_NgD  # before the next ones are made
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _parts(
    cache: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """k, v and their scales."""
    k, v, *scales = cache
    return k, v, (scales[0], scales[1]) if scales else None
