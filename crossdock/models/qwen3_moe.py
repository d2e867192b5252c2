"""Qwen3-MoE (arXiv 2505.09388)."""

from crossdock.models.base import Family
from crossdock.models.weights import load_gqa

FAMILY = Family(load_attention=load_gqa)
