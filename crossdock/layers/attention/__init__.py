"""Attention over the paged cache, in torch. A layer is called with (x_TH, cache, plan)."""

from collections.abc import Callable

from torch import Tensor

from crossdock.layers.attention.gqa import GQAttention, GQAWeights
from crossdock.layers.attention.mla import MLAttention, MLAWeights
from crossdock.layers.attention.plan import AttentionPlan, AttentionPlanner

Attention = Callable[[Tensor, tuple[Tensor, ...], AttentionPlan], Tensor]

__all__ = [
    "Attention",
    "AttentionPlan",
    "AttentionPlanner",
    "GQAWeights",
    "GQAttention",
    "MLAWeights",
    "MLAttention",
]
