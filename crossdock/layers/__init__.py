"""Attention, linear, norm, rope, dense MLP: tensors and a `Group`, no experts."""

from crossdock.layers.attention import (
    Attention,
    AttentionBackend,
    AttentionName,
    AttentionPlan,
    AttentionPlanner,
    GQAttention,
    GQAWeights,
    MLAttention,
    MLAWeights,
    choose_attention,
)
from crossdock.layers.group import SoloGroup
from crossdock.layers.linear import (
    BatchMatMul,
    MatMul,
    Products,
    choose_products,
    invariant_linear,
    invariant_swiglu,
    linear,
    swiglu,
)
from crossdock.layers.mlp import DenseMLP
from crossdock.layers.norm import RMSNorm
from crossdock.layers.rope import Rope, half_split_order, softmax_scale

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionName",
    "AttentionPlan",
    "AttentionPlanner",
    "BatchMatMul",
    "DenseMLP",
    "GQAWeights",
    "GQAttention",
    "MLAWeights",
    "MLAttention",
    "MatMul",
    "Products",
    "RMSNorm",
    "Rope",
    "SoloGroup",
    "choose_attention",
    "choose_products",
    "half_split_order",
    "invariant_linear",
    "invariant_swiglu",
    "linear",
    "softmax_scale",
    "swiglu",
]
