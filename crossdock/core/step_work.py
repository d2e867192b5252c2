"""What a step cannot do without: floating-point operations, and bytes to read, of one rank."""

from dataclasses import dataclass

from crossdock.core.batch import Plan
from crossdock.core.model_spec import GQASpec, MLASpec, ModelSpec


@dataclass(frozen=True)
class RankWork:
    """
    Args:
        dense_bytes: of the weights that every step with tokens reads, as they are held here: all
            but the routed experts and a table of embeddings.
        expert_bytes: of one routed expert in one layer.
        kv_bytes: of a cached token, all layers.
        tp: ranks that share the work of their group.
    """

    spec: ModelSpec
    dense_bytes: int
    expert_bytes: int
    kv_bytes: float
    tp: int = 1

    def flops(self, plan: Plan) -> int:
        """Of the tokens of this rank, wherever their experts are: summed over ranks it is what the
        model takes. Heads of MLA are counted in the cheaper form: absorbed for a token that comes
        alone, else expanded."""
        spec = self.spec
        vocabulary = spec.vocab_size * spec.hidden_size
        tables = vocabulary * (1 if spec.tie_word_embeddings else 2)
        total = 2 * (spec.params_with(spec.moe.top_k) - tables) * plan.num_tokens
        total += 2 * vocabulary * sum(item.sample for item in plan.items)
        window = _window(spec.attention)
        for item in plan.items:
            new = len(item.tokens)
            pairs = _attended(item.start + new, window) - _attended(item.start, window)
            total += spec.num_layers * _attention_flops(spec.attention, pairs, new > 1)
        return total // self.tp

    def bytes(self, plan: Plan, experts: int) -> int:
        """Weights, each once, and the KV of each sequence, once.

        Args:
            experts: of this rank, that got rows; summed over layers.
        """
        window = _window(self.spec.attention)
        cached = sum(
            min(item.start + len(item.tokens), window + len(item.tokens)) for item in plan.items
        )
        dense = self.dense_bytes if plan.items else 0
        return int(dense + experts * self.expert_bytes + cached * self.kv_bytes)


def _window(attention: GQASpec | MLASpec) -> int:
    window = attention.sliding_window if isinstance(attention, GQASpec) else None
    return window or 1 << 62


def _attended(tokens: int, window: int) -> int:
    """Pairs of a token and one that it sees, itself too, among the first `tokens` of a sequence."""
    inside = min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


def _attention_flops(attention: GQASpec | MLASpec, pairs: int, expanded: bool) -> int:
    if isinstance(attention, GQASpec) or not expanded:
        return attention.flops(pairs)
    qk = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return 2 * attention.num_heads * pairs * (qk + attention.v_head_dim)
