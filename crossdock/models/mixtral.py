"""Mixtral (arXiv 2401.04088). Its MoE block and experts have names of their own on the hub; held
fused, transformers calls the block like everybody."""

from crossdock.models.base import Family
from crossdock.models.weights import load_gqa

FAMILY = Family(
    load_attention=load_gqa, blocks=("block_sparse_moe", "mlp"), experts=("w1", "w3", "w2")
)
