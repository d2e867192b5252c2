"""Grouped-query attention (arXiv 2305.13245) over the paged cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core import GQASpec, Group
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
class GQAWeights:
    """h query and k key/value heads of width D. qkv [(h + 2k) * D, H]; norms over D ("head") or
    over the whole projection ("full"), None without. Matrices as `Products.matmul` takes them."""

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class GQAttention:
    def __init__(
        self, spec: GQASpec, weights: GQAWeights, eps: float, products: Products, group: Group
    ):
        self.spec, self.w, self.products, self.group = spec, weights, products, group
        self.scale = spec.head_dim**-0.5
        self.norms: tuple[RMSNorm, ...] = ()
        if weights.q_norm is not None and weights.k_norm is not None:
            self.norms = (
                RMSNorm(weights.q_norm, eps, products.invariant),
                RMSNorm(weights.k_norm, eps, products.invariant),
            )

    def __call__(self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        """[T, H] to [t, H]; first writes the rows' keys and values to `cache`, as `KVCache` has
        it."""
        q_ThD = self._project(x_TH, cache, plan)
        if plan.by_row:
            out_TV = self._invariant(q_ThD, cache, plan)
        else:
            parts = (
                []
                if plan.decodes is None
                else [self._decode(q_ThD[: plan.decodes.count], cache, plan.decodes)]
            )
            parts += [self._prefill(q_ThD[p.start : p.end], cache, p) for p in plan.prefills]
            out_TV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.group.reduce_scatter(self.products.matmul(out_TV, self.w.out, self.w.out_bias))

    def _project(self, x_TH: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        """Turned queries [T, h, D]; keys and values go to the cache."""
        s = self.spec
        qkv = self.products.matmul(x_TH, self.w.qkv, self.w.qkv_bias)
        heads = s.num_heads + s.num_kv_heads
        qk, v = qkv.split((heads * s.head_dim, s.num_kv_heads * s.head_dim), dim=-1)
        if self.norms:
            qk = self._normed(qk)
        if s.clip_qkv is not None:
            qk, v = qk.clamp(-s.clip_qkv, s.clip_qkv), v.clamp(-s.clip_qkv, s.clip_qkv)
        qk_ThD = rotate(qk.view(-1, heads, s.head_dim), plan.cos_T1D, plan.sin_T1D)
        q_ThD, k_TkD = qk_ThD.split((s.num_heads, s.num_kv_heads), dim=1)
        v_TkD = v.view(-1, s.num_kv_heads, s.head_dim)
        # Values are finite, as `kernels.rope` makes them.
        for (rows, scales), x_TkD in zip(_halves(cache), (k_TkD, v_TkD.nan_to_num()), strict=True):
            write_rows(rows, scales, plan.slots_T, x_TkD)
        return q_ThD

    def _normed(self, qk: Tensor) -> Tensor:
        s, (q_norm, k_norm) = self.spec, self.norms
        q, k = qk.split((s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim), dim=-1)
        if s.qk_norm == "head":
            q = q_norm(q.unflatten(-1, (-1, s.head_dim))).flatten(1)
            k = k_norm(k.unflatten(-1, (-1, s.head_dim))).flatten(1)
        else:
            q, k = q_norm(q), k_norm(k)
        return torch.cat((q, k), dim=-1)

    def _decode(self, q_BhD: Tensor, cache: tuple[Tensor, ...], rows: DecodeRows) -> Tensor:
        """The heads that share a key stand where rows of one sequence would: one fused call, and no
        copy of the keys per head."""
        s = self.spec

        def attend(q_BGMD: Tensor, group: DecodeGroup) -> Tensor:
            B, G, M, _ = q_BGMD.shape
            k, v = (
                read_rows(rows, scales, group.slots, q_BGMD.dtype).view(B, -1, *rows.shape[1:])
                for rows, scales in _halves(cache)
            )
            # Spelled out per head: the fused GPU kernels do not broadcast a bias over query rows.
            bias = group.bias_BN[:, None, None].expand(B, G, M, -1)
            return F.scaled_dot_product_attention(
                q_BGMD, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=self.scale
            )

        q_BGMD = q_BhD.unflatten(1, (s.num_kv_heads, -1))
        return rows.attend(q_BGMD, attend).flatten(1)

    def _prefill(self, q_ThD: Tensor, cache: tuple[Tensor, ...], rows: PrefillRows) -> Tensor:
        k, v = (
            read_rows(*half, rows.slots_N, q_ThD.dtype).transpose(0, 1)[None]
            for half in _halves(cache)
        )
        out = F.scaled_dot_product_attention(
            q_ThD.transpose(0, 1)[None],
            k,
            v,
            attn_mask=rows.bias_TN,
            is_causal=rows.bias_TN is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _invariant(self, q_ThD: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        if plan.fixed is not None:
            return fixed_attention(q_ThD, cache, plan.fixed, self.scale).flatten(1)
        s, T = self.spec, q_ThD.shape[0]

        def read(slots: Tensor) -> tuple[Tensor, Tensor]:
            k, v = (
                read_rows(*half, slots, torch.float32)
                .view(T, KEY_BLOCK, s.num_kv_heads, s.head_dim)
                .transpose(1, 2)
                .reshape(-1, KEY_BLOCK, s.head_dim)
                for half in _halves(cache)
            )
            return k, v

        q_TGMD = q_ThD.unflatten(1, (s.num_kv_heads, -1))
        out = blockwise_attention(q_TGMD, plan.blocks, read, self.scale)
        return out.flatten(1).to(q_ThD.dtype)


def _halves(cache: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """(rows, scales or None) of keys and of values."""
    k_scales, v_scales = cache[2:] or (None, None)
    return (cache[0], k_scales), (cache[1], v_scales)
