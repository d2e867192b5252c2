"""What a model is, in numbers: shapes, routing, positions, and what they cost.

Knows neither torch nor any checkpoint's code; `hf_config.py` makes it from a config.json.
"""

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions. `kind` "yarn" follows arXiv 2309.00071; mscale as in DeepSeek-V2."""

    dim: int
    theta: float
    interleaved: bool = False
    kind: Literal["default", "linear", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention. `qk_norm`: none, per "head", or over the "full" projection."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: Literal["none", "head", "full"] = "none"
    bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None

    @property
    def kv_width(self) -> int:
        """Cached values per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_scales(self) -> int:
        """fp32 scales per token and layer of our FP8 cache: of keys and values of each head."""
        return 2 * self.num_kv_heads

    def params(self, hidden: int) -> int:
        return hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    def flops(self, context: int) -> int:
        """Per token and layer, scores and values over `context` cached tokens."""
        return 4 * self.num_heads * self.head_dim * context


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); cached are latent and rope key."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False

    @property
    def kv_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_scales(self) -> int:
        """As of `GQASpec`: of the latent and of the rope key."""
        return 2

    def params(self, hidden: int) -> int:
        qk = self.qk_nope_head_dim + self.qk_rope_head_dim
        q = self.num_heads * qk * (self.q_lora_rank or hidden) + hidden * (self.q_lora_rank or 0)
        kv = hidden * self.kv_width + self.kv_lora_rank * self.num_heads * (
            self.qk_nope_head_dim + self.v_head_dim
        )
        return q + kv + self.num_heads * self.v_head_dim * hidden

    def flops(self, context: int) -> int:
        """Per token and layer, absorbed form over the latent cache."""
        return 2 * self.num_heads * context * (self.kv_width + self.kv_lora_rank)


@dataclass(frozen=True)
class MoESpec:
    """The routed experts of a layer and how a token chooses among them.

    `group_score`: how a group of experts is scored when routing is group-limited: "max" of its
    scores (DeepSeek-V2) or the sum of its "top2" (DeepSeek-V3); `num_groups` 1 means no groups.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    correction_bias: bool = False
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class QuantSpec:
    """Block-quantised FP8 weights: one fp32 scale (`weight_scale_inv`) per block."""

    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention: GQASpec | MLASpec
    rope: RopeSpec
    moe: MoESpec
    moe_layers: tuple[int, ...]
    """Indices of the layers with routed experts, ascending; the others are dense."""
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    dtype: str = "bfloat16"
    quant: QuantSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def expert_params(self) -> int:
        """Of one routed expert in one layer."""
        return 3 * self.hidden_size * self.moe.intermediate_size

    @property
    def num_params(self) -> int:
        """Matrix parameters; norms and biases are left out."""
        return self.params_with(self.moe.num_experts)

    @property
    def active_params(self) -> int:
        """Matrix parameters that one token uses."""
        return self.params_with(self.moe.top_k)

    def params_with(self, experts: int) -> int:
        """As if a layer had `experts` routed ones, for instance those of one rank."""
        h, n_moe = self.hidden_size, len(self.moe_layers)
        per_moe = experts * self.expert_params + h * self.moe.num_experts
        per_moe += 3 * h * self.moe.shared_intermediate_size
        dense = (self.num_layers - n_moe) * 3 * h * self.intermediate_size
        head = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.attention.params(h) + n_moe * per_moe + dense + head

    def flops_per_token(self, context: int) -> int:
        """Of one forward pass of one token that attends to `context` tokens."""
        matrices = 2 * (self.active_params - self.vocab_size * self.hidden_size)
        return matrices + self.num_layers * self.attention.flops(context)

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Of the values; the scales of an FP8 cache are each engine's own affair."""
        return self.num_layers * self.attention.kv_width * DTYPE_BYTES[dtype]


def check_spec(spec: ModelSpec) -> None:
    """Raises ValueError for numbers that no model can have together, named as in config.json."""
    moe, attention = spec.moe, spec.attention
    if not 1 <= moe.top_k <= moe.num_experts:
        raise ValueError(f"num_experts_per_tok {moe.top_k} of {moe.num_experts} experts")
    if moe.num_experts % moe.num_groups or not 1 <= moe.topk_groups <= moe.num_groups:
        raise ValueError(
            f"topk_group {moe.topk_groups} of n_group {moe.num_groups} of {moe.num_experts} "
            "experts; expected groups that divide the experts, and no more of them than there are"
        )
    group = moe.num_experts // moe.num_groups
    if moe.num_groups > 1 and (group < 2 or moe.top_k > moe.topk_groups * group):
        raise ValueError(
            f"num_experts_per_tok {moe.top_k} of topk_group {moe.topk_groups} groups of {group} "
            "experts; expected groups of 2 or more, and no more experts than the chosen ones hold"
        )
    if not spec.moe_layers:
        raise ValueError("none of the layers has routed experts")
    if isinstance(attention, GQASpec) and attention.num_heads % attention.num_kv_heads:
        raise ValueError(
            f"num_attention_heads {attention.num_heads} is no multiple of num_key_value_heads "
            f"{attention.num_kv_heads}"
        )
    if spec.rope.dim < 2 or spec.rope.dim % 2:
        name = "head_dim" if isinstance(attention, GQASpec) else "qk_rope_head_dim"
        raise ValueError(f"{name} {spec.rope.dim}; expected an even number: positions turn pairs")
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {spec.dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
