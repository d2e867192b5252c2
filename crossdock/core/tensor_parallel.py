"""How attention and dense layers are split over the ranks of an attention group (tp).

Attention by heads, dense layers by their width. Norms, router, MLA's down-projections and latent
cache, shared experts, embedding and LM head are whole on every rank: shared experts see a rank's
share of the tokens alone, as the router does.

The routed experts are not split: a rank holds whole ones, over all ranks. Split by tp, each would
be tp times narrower (DeepSeek-V3's 2,048 over 8: 256, two tiles of a kernel), every rank would read
a part of every expert for every token, and their outputs would have to be summed over the group.
"""

from dataclasses import replace

from crossdock.core.config import TP_SIZES
from crossdock.core.errors import ConfigError
from crossdock.core.model_spec import GQASpec, MLASpec, ModelSpec


def shard_attention(attention: GQASpec | MLASpec, tp: int) -> GQASpec | MLASpec:
    """What one of `tp` ranks computes; `tp` divides the heads."""
    heads = attention.num_heads // tp
    if isinstance(attention, MLASpec):
        return replace(attention, num_heads=heads)
    return replace(attention, num_heads=heads, num_kv_heads=attention.num_kv_heads // tp)


def check_tp(spec: ModelSpec, tp: int, block: int | None) -> None:
    """
    Args:
        block: side of the blocks that share a scale, where weights are held in FP8.

    Raises:
        ConfigError: `tp` ranks cannot split the model; says why, and the sizes that work.
    """
    against = why_not_tp(spec, tp, block)
    if against:
        working = [str(n) for n in TP_SIZES if not why_not_tp(spec, n, block)]
        raise ConfigError(
            f"tp = {tp} cannot split this model: {'; '.join(against)}; "
            f"sizes that work: {', '.join(working)}"
        )


def why_not_tp(spec: ModelSpec, tp: int, block: int | None) -> list[str]:
    """Empty where `tp` ranks can split the model; `block` as in `check_tp`."""
    if tp == 1:
        return []
    a = spec.attention
    counts = {"attention heads": a.num_heads}
    if isinstance(a, GQASpec):
        counts["KV heads"] = a.num_kv_heads
        widths = {"query": a.num_heads * a.head_dim, "KV": a.num_kv_heads * a.head_dim}
    else:
        nope_rope = a.qk_nope_head_dim + a.qk_rope_head_dim
        widths = {"query": a.num_heads * nope_rope, "attention output": a.num_heads * a.v_head_dim}
    if len(spec.moe_layers) < spec.num_layers:
        counts["columns of dense layers"] = spec.intermediate_size
        widths["dense"] = spec.intermediate_size
    found = [f"{tp} does not divide {n} {what}" for what, n in counts.items() if n % tp]
    if isinstance(a, GQASpec) and a.qk_norm == "full":
        found.append("its norms of queries and keys go over all heads")
    if block is not None and not found:
        found = [
            f"a shard of the {what} width, {n} / {tp} = {n // tp}, cuts an FP8 block of {block}"
            for what, n in widths.items()
            if n // tp % block
        ]
    return found
