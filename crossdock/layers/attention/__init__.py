"""Attention over the paged cache, in torch, on Triton kernels and on FlashInfer's. A layer is
called with (x_TH, cache, plan), the plan made by the planner of the same backend."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from crossdock.layers.attention.backend import (
    AttentionBackend,
    AttentionName,
    LaysOut,
    Planner,
    choose_attention,
)
from crossdock.layers.attention.flashinfer_library import AttentionCase
from crossdock.layers.attention.gqa import GQAttention, GQAWeights
from crossdock.layers.attention.mla import MLAttention, MLAWeights
from crossdock.layers.attention.plan import AttentionPlan, AttentionPlanner

Attention = Callable[[Tensor, tuple[Tensor, ...], Any], Tensor]

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionCase",
    "AttentionName",
    "AttentionPlan",
    "AttentionPlanner",
    "GQAWeights",
    "GQAttention",
    "LaysOut",
    "MLAWeights",
    "MLAttention",
    "Planner",
    "choose_attention",
]
