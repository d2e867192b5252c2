"""Multi-head latent attention on Triton kernels; `mla.py` is its torch form.

Decoding is absorbed: scores and sums over the latent cache, the up-projections folded into queries
and outputs. Prefill expands keys and values: 2 * (192 + 128) operations a head and pair of tokens
instead of 2 * (576 + 512), for an expansion that pays from some 170 queries of a sequence on.
"""

import torch
from torch import Tensor

from crossdock.core import Group, MLASpec
from crossdock.kernels.attention_mla import decode_mla
from crossdock.kernels.attention_prefill import prefill_mla
from crossdock.kernels.rms_norm import rms_norm
from crossdock.kernels.rope import mla_norm_rope_write
from crossdock.layers.attention.mla import MLAWeights
from crossdock.layers.attention.paged_plan import (
    Decodes,
    PagedDecode,
    PagedPlan,
    PagedPrefill,
    Prompts,
    Turn,
)
from crossdock.layers.linear import Products

EXPANDED_BYTES = 1 << 30
"""Of keys and values at once; longer prefills go through the heads in several turns."""


class PagedMLAttention:
    def __init__(
        self,
        spec: MLASpec,
        weights: MLAWeights,
        eps: float,
        scale: float,
        products: Products,
        group: Group,
    ):
        """`eps` of the norms of the latents; `scale` of the scores (`rope.softmax_scale`)."""
        self.spec, self.w, self.products, self.group = spec, weights, products, group
        self.eps, self.scale = eps, scale
        self.up_hCL = weights.kv_b.view(spec.num_heads, -1, spec.kv_lora_rank)
        self.up_k_hPL = self.up_hCL[:, : spec.qk_nope_head_dim]
        self.up_v_hLV = self.up_hCL[:, spec.qk_nope_head_dim :].transpose(1, 2)

    def __call__(self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: PagedPlan) -> Tensor:
        """[T, H] to [t, H]; first writes the rows' latents to `cache`: [S, L + R], and for E4M3
        its scales [S, 2]."""
        s, matmul = self.spec, self.products.matmul
        a = matmul(x_TH, self.w.a, self.w.a_bias)
        q = a[:, : -s.kv_width]
        if self.w.q_norm is not None and self.w.q_b is not None:
            q = matmul(rms_norm(q, self.w.q_norm, self.eps), self.w.q_b, None)
        q_ThP, q_ThR = q.unflatten(-1, (s.num_heads, -1)).split(
            (s.qk_nope_head_dim, s.qk_rope_head_dim), dim=-1
        )
        q_ThR = mla_norm_rope_write(
            q_ThR, a[:, -s.kv_width :], self.w.kv_norm, self.eps, plan.cos_PD, plan.sin_PD,
            plan.positions_T, plan.slots_T, cache,
        )  # fmt: skip
        decoded = prefilled = None
        if plan.decode is not None:
            n = plan.decode.count
            decoded = self._decode(q_ThP[:n], q_ThR[:n], cache, plan.decode, plan.page_size)
        if plan.prefill is not None:
            n = plan.prefill.start
            prefilled = self._prefill(q_ThP[n:], q_ThR[n:], cache, plan.prefill)
        out_TV = plan.join(decoded, prefilled)
        return self.group.reduce_scatter(matmul(out_TV, self.w.out, self.w.out_bias))

    def _decode(
        self, q_BhP: Tensor, q_BhR: Tensor, cache: tuple[Tensor, ...], d: Decodes, page: int
    ) -> Tensor:
        """[B, h * V]."""
        batch_matmul = self.products.batch_matmul
        q_BhL = batch_matmul(q_BhP.transpose(0, 1), self.up_k_hPL).transpose(0, 1)
        out_BhL = self._attend(q_BhL, q_BhR, cache, d, page)
        return batch_matmul(out_BhL.transpose(0, 1), self.up_v_hLV).transpose(0, 1).flatten(1)

    def _attend(
        self, q_BhL: Tensor, q_BhR: Tensor, cache: tuple[Tensor, ...], d: Decodes, page: int
    ) -> Tensor:
        """Weighted latents, [B, h, L]."""
        assert isinstance(d, PagedDecode)
        scales = cache[1] if len(cache) > 1 else None
        return decode_mla(
            q_BhL, q_BhR, cache[0], d.table_BP, d.lens_B, d.split, self.scale, page, scales
        )

    def _prefill(
        self, q_ThP: Tensor, q_ThR: Tensor, cache: tuple[Tensor, ...], p: Prompts
    ) -> Tensor:
        """[T, h * V]."""
        assert isinstance(p, PagedPrefill)
        parts = [self._attend_prompts(q_ThP[t.rows], q_ThR[t.rows], cache, t) for t in p.turns]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_prompts(
        self, q_ThP: Tensor, q_ThR: Tensor, cache: tuple[Tensor, ...], p: Turn
    ) -> Tensor:
        s = self.spec
        assert p.slots_N is not None and p.cu_k_B1 is not None
        rows_NC = cache[0].index_select(0, p.slots_N)
        if len(cache) > 1:
            rows_NC = _dequantised(rows_NC, cache[1][p.slots_N], s.kv_lora_rank, q_ThP.dtype)
        latent_NL, k_NR = rows_NC.split((s.kv_lora_rank, s.qk_rope_head_dim), dim=-1)
        nope, width = s.qk_nope_head_dim, s.qk_nope_head_dim + s.v_head_dim
        row_bytes = len(rows_NC) * width * rows_NC.element_size()
        step = max(1, min(s.num_heads, EXPANDED_BYTES // max(row_bytes, 1)))
        parts = []
        for h in range(0, s.num_heads, step):
            up_CL = self.up_hCL[h : h + step].flatten(0, 1)
            kv_NhC = self.products.matmul(latent_NL, up_CL, None).unflatten(-1, (-1, width))
            parts.append(
                prefill_mla(q_ThP[:, h : h + step], q_ThR[:, h : h + step], kv_NhC[..., :nope],
                            kv_NhC[..., nope:], k_NR, p.cu_q_B1, p.cu_k_B1, p.lens_B, p.split,
                            self.scale)
            )  # fmt: skip
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(1)


def _dequantised(rows_NC: Tensor, scales_N2: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    parts = rows_NC.float().split((latent, rows_NC.shape[1] - latent), dim=1)
    scaled = [x * scale[:, None] for x, scale in zip(parts, scales_N2.unbind(1), strict=True)]
    return torch.cat(scaled, dim=1).to(dtype)
