"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds the normed latent and one rotated key, shared by all heads. Decoding stays in the
latent space: the up-projections of keys and values are absorbed into queries and outputs. Prefill
expands keys and values once per sequence, which costs fewer operations per query.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core import Group, MLASpec
from crossdock.layers.attention.blockwise import blockwise_attention, fixed_attention
from crossdock.layers.attention.cached import read_rows, write_rows
from crossdock.layers.attention.plan import (
    KEY_BLOCK,
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    PrefillRows,
)
from crossdock.layers.linear import Products
from crossdock.layers.norm import RMSNorm
from crossdock.layers.rope import rotate


@dataclass(frozen=True, eq=False)
class MLAWeights:
    """h heads, Q = q_lora_rank, L = kv_lora_rank, R = rope, P = nope + R, V = value width.

    a: all projections of the hidden state, rows [queries (Q, or h * P without q_lora) | L | R].
    q_b [h * P, Q] and q_norm [Q], None without q_lora; kv_norm [L]; kv_b [h * (nope + V), L].
    Rows of rotated dimensions are in half-split order. a, q_b and out as `Products.matmul` takes
    them; kv_b a tensor.
    """

    a: Tensor
    kv_norm: Tensor
    kv_b: Tensor
    out: Tensor
    q_norm: Tensor | None = None
    q_b: Tensor | None = None
    a_bias: Tensor | None = None
    out_bias: Tensor | None = None


class MLAttention:
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
        self.scale = scale
        self.kv_norm = RMSNorm(weights.kv_norm, eps, products.invariant)
        self.q_norm: RMSNorm | None = None
        if weights.q_norm is not None:
            self.q_norm = RMSNorm(weights.q_norm, eps, products.invariant)
        self.parts = slice(0, spec.kv_lora_rank), slice(spec.kv_lora_rank, spec.kv_width)
        up = weights.kv_b.view(spec.num_heads, -1, spec.kv_lora_rank)
        self.up_k_hPL = up[:, : spec.qk_nope_head_dim]
        self.up_v_hLV = up[:, spec.qk_nope_head_dim :].transpose(1, 2)

    def __call__(self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        """[T, H] to [t, H]; first writes the rows' latents to `cache`, as `KVCache` has it."""
        q_nope_ThD, q_rope_ThD = self._project(x_TH, cache, plan)
        if plan.by_row:
            out_TV = self._invariant(q_nope_ThD, q_rope_ThD, cache, plan)
        else:
            decodes, parts = plan.decodes, []
            if decodes is not None:
                n = decodes.count
                parts.append(self._decode(q_nope_ThD[:n], q_rope_ThD[:n], cache, decodes))
            for rows in plan.prefills:
                mine = slice(rows.start, rows.end)
                q_ThD = torch.cat((q_nope_ThD[mine], q_rope_ThD[mine]), dim=-1)
                parts.append(self._prefill(q_ThD, cache, rows))
            out_TV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.group.reduce_scatter(self.products.matmul(out_TV, self.w.out, self.w.out_bias))

    def _project(
        self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, h, nope] and, turned, [T, h, R]; latents and turned keys go to the cache."""
        s, matmul = self.spec, self.products.matmul
        a = matmul(x_TH, self.w.a, self.w.a_bias)
        latent_TL, key_TR = a[:, -s.kv_width :].split((s.kv_lora_rank, s.qk_rope_head_dim), dim=-1)
        key_T1R = rotate(key_TR.unsqueeze(1), plan.cos_T1D, plan.sin_T1D)
        rows_SC, *scales = cache
        # Values are finite, as `kernels.rope` makes them.
        new_TC = torch.cat((self.kv_norm(latent_TL).nan_to_num(), key_T1R.squeeze(1)), dim=-1)
        if scales:
            for i, part in enumerate(self.parts):
                write_rows(rows_SC[:, part], scales[0][:, i], plan.slots_T, new_TC[:, part])
        else:
            write_rows(rows_SC, None, plan.slots_T, new_TC)
        q = a[:, : -s.kv_width]
        if self.q_norm is not None and self.w.q_b is not None:
            q = matmul(self.q_norm(q), self.w.q_b, None)
        q_nope, q_rope = q.unflatten(-1, (s.num_heads, -1)).split(
            (s.qk_nope_head_dim, s.qk_rope_head_dim), dim=-1
        )
        return q_nope, rotate(q_rope, plan.cos_T1D, plan.sin_T1D)

    def _absorbed(self, q_nope_ThD: Tensor, q_rope_ThD: Tensor) -> Tensor:
        """Queries over the cache's rows: [T, h, L + R]."""
        q_hTL = self.products.batch_matmul(q_nope_ThD.transpose(0, 1), self.up_k_hPL)
        return torch.cat((q_hTL.transpose(0, 1), q_rope_ThD), dim=-1)

    def _values(self, out_ThL: Tensor) -> Tensor:
        """Weighted latents to the heads' outputs, [T, h * V]."""
        out_hTV = self.products.batch_matmul(out_ThL.transpose(0, 1), self.up_v_hLV)
        return out_hTV.transpose(0, 1).flatten(1)

    def _read(self, cache: tuple[Tensor, ...], slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[slots, L + R]"""
        rows_SC, *scales = cache
        if not scales:
            return read_rows(rows_SC, None, slots, dtype)
        parts = [
            read_rows(rows_SC[:, part], scales[0][:, i], slots, dtype)
            for i, part in enumerate(self.parts)
        ]
        return torch.cat(parts, dim=-1)

    def _decode(
        self, q_nope: Tensor, q_rope: Tensor, cache: tuple[Tensor, ...], rows: DecodeRows
    ) -> Tensor:
        def attend(q_BhC: Tensor, group: DecodeGroup) -> Tensor:
            keys = self._read(cache, group.slots, q_BhC.dtype)
            keys_BNC = keys.view(q_BhC.shape[0], -1, keys.shape[1])
            bias_B1N = group.bias_BN[:, None]
            scores = torch.baddbmm(bias_B1N, q_BhC, keys_BNC.transpose(1, 2), alpha=self.scale)
            weights = scores.softmax(-1, dtype=torch.float32).to(q_BhC.dtype)
            return torch.bmm(weights, keys_BNC[..., : self.spec.kv_lora_rank])

        return self._values(rows.attend(self._absorbed(q_nope, q_rope), attend))

    def _prefill(self, q_ThD: Tensor, cache: tuple[Tensor, ...], rows: PrefillRows) -> Tensor:
        s = self.spec
        latent_NL, key_NR = self._read(cache, rows.slots_N, q_ThD.dtype).split(
            (s.kv_lora_rank, s.qk_rope_head_dim), dim=-1
        )
        kv = self.products.matmul(latent_NL, self.w.kv_b, None).unflatten(-1, (s.num_heads, -1))
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), dim=-1)
        k = torch.cat((k_nope, key_NR[:, None].expand(-1, s.num_heads, -1)), dim=-1)
        # The fused kernels want values as wide as keys.
        v = F.pad(v, (0, max(0, k.shape[-1] - s.v_head_dim)))
        out = F.scaled_dot_product_attention(
            q_ThD.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=rows.bias_TN,
            is_causal=rows.bias_TN is None,
            scale=self.scale,
        )
        return out[0, ..., : s.v_head_dim].transpose(0, 1).flatten(1)

    def _invariant(
        self, q_nope: Tensor, q_rope: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan
    ) -> Tensor:
        def read(slots: Tensor) -> tuple[Tensor, Tensor]:
            keys = self._read(cache, slots, torch.float32).view(-1, KEY_BLOCK, self.spec.kv_width)
            return keys, keys[..., : self.spec.kv_lora_rank]

        q_ThC = self._absorbed(q_nope, q_rope)
        if plan.fixed is not None:
            latent = self.spec.kv_lora_rank
            return self._values(fixed_attention(q_ThC, cache, plan.fixed, self.scale, latent))
        out_T1hL = blockwise_attention(q_ThC.unsqueeze(1), plan.blocks, read, self.scale)
        return self._values(out_T1hL.squeeze(1).to(q_nope.dtype))
