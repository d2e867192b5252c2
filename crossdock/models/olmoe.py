"""OLMoE (arXiv 2409.02060)."""

from crossdock.models.base import Family
from crossdock.models.weights import load_gqa

FAMILY = Family(load_attention=load_gqa)
