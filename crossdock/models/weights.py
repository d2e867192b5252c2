"""Where a model's weights come from, and how the parts that families share are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crossdock.core import GQASpec, Group, MLASpec, ModelSpec
from crossdock.layers import (
    Attention,
    AttentionBackend,
    DenseMLP,
    GQAWeights,
    MLAWeights,
    Products,
    RMSNorm,
    half_split_order,
    softmax_scale,
)
from crossdock.moe import MoEWeights


class WeightSource(Protocol):
    """Tensors of a checkpoint by name, in the model's dtype (float32 if `fp32`), on its device.

    Raises CheckpointError: names file, tensor, the shape found and the shape expected.
    """

    def has(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> Tensor: ...

    def get_slice(
        self, name: str, index: int, shape: tuple[int, ...], fp32: bool = False
    ) -> Tensor:
        """Row `index` of a tensor; `shape` is the row's."""
        ...


@dataclass(frozen=True, eq=False)
class Loader:
    """What reading any part needs."""

    spec: ModelSpec
    source: WeightSource
    products: Products
    group: Group
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend

    def norm(self, name: str) -> RMSNorm:
        """A norm over the hidden size."""
        weight_H = self.source.get(f"{name}.weight", (self.spec.hidden_size,))
        return RMSNorm(weight_H, self.spec.rms_norm_eps)


LoadAttention = Callable[[Loader, str], Attention]
"""(loader, prefix of the layer's attention)"""


def load_gqa(load: Loader, prefix: str) -> Attention:
    """q_proj, k_proj, v_proj and o_proj, with q_norm and k_norm where the spec has them."""
    s, get, H = load.spec.attention, load.source.get, load.spec.hidden_size
    pack = load.products.pack
    assert isinstance(s, GQASpec)
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    norms = {"none": None, "head": (s.head_dim, s.head_dim), "full": (q, kv)}[s.qk_norm]
    weights = GQAWeights(
        qkv=pack(torch.cat([get(f"{prefix}.{name}.weight", (n, H)) for name, n in parts])),
        out=pack(get(f"{prefix}.o_proj.weight", (H, q))),
        qkv_bias=torch.cat([get(f"{prefix}.{name}.bias", (n,)) for name, n in parts])
        if s.bias
        else None,
        out_bias=get(f"{prefix}.o_proj.bias", (H,)) if s.output_bias else None,
        q_norm=get(f"{prefix}.q_norm.weight", (norms[0],)) if norms else None,
        k_norm=get(f"{prefix}.k_norm.weight", (norms[1],)) if norms else None,
    )
    make = load.attention.gqa
    return make(s, weights, load.spec.rms_norm_eps, load.products, load.group)


def load_mla(load: Loader, prefix: str, latent_eps: float) -> Attention:
    """DeepSeek's names; rotated rows come out in half-split order."""
    s, get, H = load.spec.attention, load.source.get, load.spec.hidden_size
    pack = load.products.pack
    assert isinstance(s, MLASpec)
    head = s.qk_nope_head_dim + s.qk_rope_head_dim
    q_rows, q_rank = s.num_heads * head, s.q_lora_rank
    q_order = _rotated_last(load.spec, s.num_heads, head)
    kv_order = _rotated_last(load.spec, 1, s.kv_width)
    kv_a, bias, q_norm = f"{prefix}.kv_a_proj_with_mqa", None, None
    if q_rank is None:
        # transformers and DeepSeek give this projection no bias, whatever attention_bias says.
        q_a = get(f"{prefix}.q_proj.weight", (q_rows, H))[q_order]
        q_b, q_bias = None, q_a.new_zeros(q_rows)
    else:
        q_a = get(f"{prefix}.q_a_proj.weight", (q_rank, H))
        q_b = get(f"{prefix}.q_b_proj.weight", (q_rows, q_rank))[q_order]
        q_norm = get(f"{prefix}.q_a_layernorm.weight", (q_rank,))
        q_bias = get(f"{prefix}.q_a_proj.bias", (q_rank,)) if s.bias else q_a.new_zeros(q_rank)
    if s.bias:
        bias = torch.cat((q_bias, get(f"{kv_a}.bias", (s.kv_width,))[kv_order]))
    up = s.num_heads * (s.qk_nope_head_dim + s.v_head_dim)
    weights = MLAWeights(
        a=pack(torch.cat((q_a, get(f"{kv_a}.weight", (s.kv_width, H))[kv_order]))),
        kv_norm=get(f"{prefix}.kv_a_layernorm.weight", (s.kv_lora_rank,)),
        kv_b=get(f"{prefix}.kv_b_proj.weight", (up, s.kv_lora_rank)),
        out=pack(get(f"{prefix}.o_proj.weight", (H, s.num_heads * s.v_head_dim))),
        q_norm=q_norm,
        q_b=None if q_b is None else pack(q_b),
        a_bias=bias,
        out_bias=get(f"{prefix}.o_proj.bias", (H,)) if s.bias else None,
    )
    scale = softmax_scale(head, load.spec.rope)
    return load.attention.mla(s, weights, latent_eps, scale, load.products, load.group)


def _rotated_last(spec: ModelSpec, heads: int, width: int) -> Tensor:
    """The order of `heads * width` rows whose last `rope.dim` of each head are rotated."""
    rows = torch.arange(heads * width).view(heads, width)
    if spec.rope.interleaved:
        rotated = rows[:, width - spec.rope.dim :]
        rows = torch.cat(
            (rows[:, : width - spec.rope.dim], rotated[:, half_split_order(spec.rope.dim)]), dim=1
        )
    return rows.flatten()


def load_mlp(load: Loader, prefix: str, width: int) -> DenseMLP:
    """gate_proj, up_proj and down_proj."""
    get, H, bias = load.source.get, load.spec.hidden_size, load.spec.mlp_bias
    pack = load.products.pack
    gate_up = [get(f"{prefix}.{name}.weight", (width, H)) for name in ("gate_proj", "up_proj")]
    return DenseMLP(
        pack(torch.cat(gate_up)),
        pack(get(f"{prefix}.down_proj.weight", (H, width))),
        load.products,
        load.group,
        torch.cat([get(f"{prefix}.{name}.bias", (width,)) for name in ("gate_proj", "up_proj")])
        if bias
        else None,
        get(f"{prefix}.down_proj.bias", (H,)) if bias else None,
    )


def load_experts(
    load: Loader, prefix: str, names: tuple[str, str, str], experts: list[int], bias: str
) -> MoEWeights:
    """Router and the experts in this rank's slots, each read once; -1 leaves a slot zero.

    Args:
        prefix: of the MoE block. The experts are `experts.{e}.{name}.weight`, or, as transformers
            holds them in memory, fused as `experts.gate_up_proj` and `experts.down_proj`.
        names: of gate, up and down.
        bias: name of the correction bias, below `prefix`.
    """
    moe, H, source = load.spec.moe, load.spec.hidden_size, load.source
    F = moe.intermediate_size
    router_EH = source.get(f"{prefix}.gate.weight", (moe.num_experts, H), fp32=True)
    bias_E = None
    if moe.correction_bias:
        bias_E = source.get(f"{prefix}.{bias}", (moe.num_experts,), fp32=True)
    S, dtype, device = len(experts), load.dtype, load.device
    gate_up_SFH = torch.zeros(S, 2 * F, H, dtype=dtype, device=device)
    down_SHF = torch.zeros(S, H, F, dtype=dtype, device=device)
    fused = source.has(f"{prefix}.experts.gate_up_proj")
    gate, up, down = names
    first: dict[int, int] = {}
    for slot, expert in enumerate(experts):
        if expert < 0:
            continue
        if expert in first:
            gate_up_SFH[slot], down_SHF[slot] = gate_up_SFH[first[expert]], down_SHF[first[expert]]
            continue
        first[expert] = slot
        if fused:
            at = f"{prefix}.experts"
            gate_up_SFH[slot] = source.get_slice(f"{at}.gate_up_proj", expert, (2 * F, H))
            down_SHF[slot] = source.get_slice(f"{at}.down_proj", expert, (H, F))
        else:
            at = f"{prefix}.experts.{expert}"
            gate_up_SFH[slot, :F] = source.get(f"{at}.{gate}.weight", (F, H))
            gate_up_SFH[slot, F:] = source.get(f"{at}.{up}.weight", (F, H))
            down_SHF[slot] = source.get(f"{at}.{down}.weight", (H, F))
    return MoEWeights(router_EH, bias_E, gate_up_SFH, down_SHF)
