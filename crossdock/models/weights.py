"""Where a model's weights come from, and how the parts that families share are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core import GQASpec, Group, MLASpec, ModelSpec, shard_attention
from crossdock.core.staging import padded
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
from crossdock.models.fp8 import Matrix, Part, fp8_experts, fp8_matrix
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

    def in_fp8(self, name: str) -> bool:
        """Whether a matrix of a product is one for `get_fp8`, in a model that runs in FP8."""
        ...

    def get_fp8(
        self,
        name: str,
        shape: tuple[int, int],
        index: int | None = None,
        order: Tensor | None = None,
    ) -> Matrix:
        """Codes and scales, the rows in `order`; `index`: as of `get_slice`."""
        ...


@dataclass
class Held:
    """Bytes of the weights that a model holds."""

    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class Loader:
    """What reading any part needs.

    `fp8`: products of attention and MLPs, and the experts, are in FP8 (`WeightSource.in_fp8`).
    Embedding, head, norms, biases, router and MLA's kv_b, whose halves are absorbed into queries
    and outputs, never are. `group`: over whose ranks heads and dense layers are split.
    """

    spec: ModelSpec
    source: WeightSource
    products: Products
    group: Group
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    fp8: bool = False
    held: Held = field(default_factory=Held)

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> Tensor:
        """A tensor to be held as it is."""
        tensor = self.source.get(name, shape, fp32)
        self.held.nbytes += tensor.nbytes
        return tensor

    def own(self, count: int) -> slice:
        """This rank's of `count` rows or columns, which the group's size divides."""
        if self.group.size == 1:
            return slice(None)
        each = count // self.group.size
        return slice(self.group.rank * each, (self.group.rank + 1) * each)

    def rows(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a tensor, to be held."""
        tensor = _cut(self.source.get(name, shape), self.own(shape[0]))
        self.held.nbytes += tensor.nbytes
        return tensor

    def once(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The bias of a product whose outputs are summed over the group: rank 0 adds it."""
        return self.get(name, shape) if self.group.rank == 0 else None

    def matrix(self, width: int, *parts: Part, columns: slice = slice(None)) -> Any:
        """The weight [own rows of all parts, own columns of `width`] of one product, as
        `products.matmul` takes it."""
        if self.fp8:
            weight = fp8_matrix(self.source, parts, width, columns)
            if weight is not None:
                self.held.nbytes += weight.nbytes
                return weight
        whole = []
        for name, rows, order, own in parts:
            tensor = self.source.get(name, (rows, width))
            whole.append(_cut(tensor if order is None else tensor[order], own, columns))
        self.held.nbytes += sum(tensor.nbytes for tensor in whole)
        return self.products.pack(torch.cat(whole) if len(whole) > 1 else whole[0])

    def norm(self, name: str) -> RMSNorm:
        """A norm over the hidden size."""
        weight_H = self.get(f"{name}.weight", (self.spec.hidden_size,))
        return RMSNorm(weight_H, self.spec.rms_norm_eps, self.products.invariant)


def _cut(x: Tensor, rows: slice, columns: slice = slice(None)) -> Tensor:
    """A tensor of its own, so that the rest is not held."""
    if rows == columns == slice(None):
        return x
    part = x[rows, columns] if x.dim() > 1 else x[rows]
    return part.clone(memory_format=torch.contiguous_format)


LoadAttention = Callable[[Loader, str], Attention]
"""(loader, prefix of the layer's attention)"""


def load_gqa(load: Loader, prefix: str) -> Attention:
    """q_proj, k_proj, v_proj and o_proj, with q_norm and k_norm where the spec has them."""
    s, get, H = load.spec.attention, load.get, load.spec.hidden_size
    assert isinstance(s, GQASpec)
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    parts = tuple(
        (name, n, load.own(n)) for name, n in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    )
    norms = {"none": None, "head": (s.head_dim, s.head_dim), "full": (q, kv)}[s.qk_norm]
    weights = GQAWeights(
        qkv=load.matrix(
            H, *(Part(f"{prefix}.{name}.weight", n, own=own) for name, n, own in parts)
        ),
        out=load.matrix(q, Part(f"{prefix}.o_proj.weight", H), columns=load.own(q)),
        qkv_bias=torch.cat([load.rows(f"{prefix}.{name}.bias", (n,)) for name, n, _ in parts])
        if s.bias
        else None,
        out_bias=load.once(f"{prefix}.o_proj.bias", (H,)) if s.output_bias else None,
        q_norm=get(f"{prefix}.q_norm.weight", (norms[0],)) if norms else None,
        k_norm=get(f"{prefix}.k_norm.weight", (norms[1],)) if norms else None,
    )
    make = load.attention.gqa
    own = shard_attention(s, load.group.size)
    return make(own, weights, load.spec.rms_norm_eps, load.products, load.group)


def load_mla(load: Loader, prefix: str, latent_eps: float) -> Attention:
    """DeepSeek's names; rotated rows come out in half-split order."""
    s, get, H = load.spec.attention, load.get, load.spec.hidden_size
    assert isinstance(s, MLASpec)
    head = s.qk_nope_head_dim + s.qk_rope_head_dim
    q_rows, q_rank = s.num_heads * head, s.q_lora_rank
    q_own = load.own(q_rows)
    q_order = _rotated_last(load.spec, s.num_heads, head)
    kv_order = _rotated_last(load.spec, 1, s.kv_width)
    kv_a, bias, q_norm, q_b = f"{prefix}.kv_a_proj_with_mqa", None, None, None
    if q_rank is None:
        # transformers and DeepSeek give this projection no bias, whatever attention_bias says.
        q_a, q_bias = Part(f"{prefix}.q_proj.weight", q_rows, q_order, q_own), None
    else:
        q_a = Part(f"{prefix}.q_a_proj.weight", q_rank)
        q_b = load.matrix(q_rank, Part(f"{prefix}.q_b_proj.weight", q_rows, q_order, q_own))
        q_norm = get(f"{prefix}.q_a_layernorm.weight", (q_rank,))
        q_bias = get(f"{prefix}.q_a_proj.bias", (q_rank,)) if s.bias else None
    if s.bias:
        kv_bias = get(f"{kv_a}.bias", (s.kv_width,))[kv_order]
        no_bias = kv_bias.new_zeros(q_rows // load.group.size)
        bias = torch.cat((no_bias if q_bias is None else q_bias, kv_bias))
    v = s.num_heads * s.v_head_dim
    up = s.num_heads * s.qk_nope_head_dim + v
    weights = MLAWeights(
        a=load.matrix(H, q_a, Part(f"{kv_a}.weight", s.kv_width, kv_order)),
        kv_norm=get(f"{prefix}.kv_a_layernorm.weight", (s.kv_lora_rank,)),
        kv_b=load.rows(f"{prefix}.kv_b_proj.weight", (up, s.kv_lora_rank)),
        out=load.matrix(v, Part(f"{prefix}.o_proj.weight", H), columns=load.own(v)),
        q_norm=q_norm,
        q_b=q_b,
        a_bias=bias,
        out_bias=load.once(f"{prefix}.o_proj.bias", (H,)) if s.bias else None,
    )
    own, scale = shard_attention(s, load.group.size), score_scale(load.spec)
    return load.attention.mla(own, weights, latent_eps, scale, load.products, load.group)


def score_scale(spec: ModelSpec) -> float:
    """What attention multiplies scores with."""
    s = spec.attention
    if isinstance(s, MLASpec):
        return softmax_scale(s.qk_nope_head_dim + s.qk_rope_head_dim, spec.rope)
    return s.head_dim**-0.5


def _rotated_last(spec: ModelSpec, heads: int, width: int) -> Tensor:
    """The order of `heads * width` rows whose last `rope.dim` of each head are rotated."""
    rows = torch.arange(heads * width).view(heads, width)
    if spec.rope.interleaved:
        rotated = rows[:, width - spec.rope.dim :]
        rows = torch.cat(
            (rows[:, : width - spec.rope.dim], rotated[:, half_split_order(spec.rope.dim)]), dim=1
        )
    return rows.flatten()


_GATE_UP = ("gate_proj", "up_proj")


def load_mlp(load: Loader, prefix: str, width: int) -> DenseMLP:
    """gate_proj, up_proj and down_proj."""
    H, bias, own, names = load.spec.hidden_size, load.spec.mlp_bias, load.own(width), _GATE_UP
    gate_up = (Part(f"{prefix}.{name}.weight", width, own=own) for name in names)
    return DenseMLP(
        load.matrix(H, *gate_up),
        load.matrix(width, Part(f"{prefix}.down_proj.weight", H), columns=own),
        load.products,
        load.group,
        torch.cat([load.rows(f"{prefix}.{name}.bias", (width,)) for name in names])
        if bias
        else None,
        load.once(f"{prefix}.down_proj.bias", (H,)) if bias else None,
    )


def load_experts(
    load: Loader, prefix: str, names: tuple[str, str, str], experts: list[int], bias: str
) -> MoEWeights:
    """Router and the experts in this rank's slots, each read once; -1 leaves a slot zero. In FP8
    all experts are, and H and F are padded with zeros to multiples of 128 throughout.

    Args:
        prefix: of the MoE block. The experts are `experts.{e}.{name}.weight`, or, as transformers
            holds them in memory, fused as `experts.gate_up_proj` and `experts.down_proj`.
        names: of gate, up and down.
        bias: name of the correction bias, below `prefix`.
    """
    moe, H = load.spec.moe, load.spec.hidden_size
    router_EH = load.get(f"{prefix}.gate.weight", (moe.num_experts, H), fp32=True)
    bias_E = None
    if moe.correction_bias:
        bias_E = load.get(f"{prefix}.{bias}", (moe.num_experts,), fp32=True)
    if load.fp8:
        router_EH = F.pad(router_EH, (0, padded(H) - H))
        sizes = H, moe.intermediate_size
        held: tuple[Tensor, ...] = fp8_experts(
            load.source, prefix, names, experts, sizes, load.device
        )
    else:
        held = _experts(load, prefix, names, experts)
    load.held.nbytes += sum(tensor.nbytes for tensor in held)
    return MoEWeights(router_EH, bias_E, *held)


def _experts(
    load: Loader, prefix: str, names: tuple[str, str, str], experts: list[int]
) -> tuple[Tensor, Tensor]:
    """gate_up [S, 2F, H], down [S, H, F]."""
    H, F, source = load.spec.hidden_size, load.spec.moe.intermediate_size, load.source
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
    return gate_up_SFH, down_SHF
