"""DeepSeek-V3 in small, written for training speed; parameters carry the Hugging Face names.

Every expert is computed for every token and the gates of the experts not chosen are zero: exactly
the routed result, and with 32 narrow experts two large matrix products beat any sorting.

Shapes: B windows, S positions, T = B*S tokens, D hidden, H heads, R latent rank, P rotary width,
E experts, G expert groups of e = E / G, K experts per token, I expert width, V vocabulary.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x_BHSP: torch.Tensor, cos_SP: torch.Tensor, sin_SP: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs (x0, x1), (x2, x3), ...; cos and sin per pair."""
    even, odd = x_BHSP[..., 0::2], x_BHSP[..., 1::2]
    return torch.cat((even * cos_SP - odd * sin_SP, odd * cos_SP + even * sin_SP), dim=-1)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k largest entries of the last dim; fuses into its neighbours, unlike topk."""
    return (x[..., None, :] > x[..., :, None]).sum(-1) < k


class Attention(nn.Module):
    """Multi-head latent attention, keys and values expanded (as in training and prefill)."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.c = c
        D, H = c.hidden_size, c.num_attention_heads
        self.q_a_proj = nn.Linear(D, c.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(
            c.q_lora_rank, H * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False
        )
        self.kv_a_proj_with_mqa = nn.Linear(D, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            c.kv_lora_rank, H * (c.qk_nope_head_dim + c.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(H * c.v_head_dim, D, bias=False)

    def forward(self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, (B, S, _), H = self.c, x_BSD.shape, self.c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        q_nope, q_rope = (
            q.view(B, S, H, -1)
            .transpose(1, 2)
            .split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        )
        latent_BSR, k_rope = self.kv_a_proj_with_mqa(x_BSD).split(
            (c.kv_lora_rank, c.qk_rope_head_dim), dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent_BSR)).view(B, S, H, -1).transpose(1, 2)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, H, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin).to(v.dtype)), dim=-1)
        k = torch.cat((k_nope, k_rope.to(v.dtype)), dim=-1)
        # Flash kernels want values as wide as keys: pad, then cut.
        v = F.pad(v, (0, k.shape[-1] - c.v_head_dim))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_head_dim]
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    """SwiGLU; the dense layer and the shared expert."""

    def __init__(self, D: int, I: int):  # noqa: E741
        super().__init__()
        self.gate_proj = nn.Linear(D, I, bias=False)
        self.up_proj = nn.Linear(D, I, bias=False)
        self.down_proj = nn.Linear(I, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias b steers the choice of groups and experts, never the gate."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> gate_BSE (zero where not chosen), load_E, sequence-wise balance loss."""
        c, E, K, G = self.c, self.c.n_routed_experts, self.c.num_experts_per_tok, self.c.n_group
        with torch.autocast(x_BSD.device.type, enabled=False):
            score_BSE = F.linear(x_BSD.float(), self.weight).sigmoid()
        choice_BSE = score_BSE.detach() + self.e_score_correction_bias
        group_BSGe = choice_BSE.unflatten(-1, (G, E // G))
        group_BSG = (group_BSGe * largest(group_BSGe, 2)).sum(-1)
        open_BSE = largest(group_BSG, c.topk_group).repeat_interleave(E // G, dim=-1)
        chosen_BSE = largest(choice_BSE.masked_fill(~open_BSE, float("-inf")), K).float()
        gate_BSE = score_BSE * chosen_BSE
        gate_BSE = gate_BSE / (gate_BSE.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        f_BE = chosen_BSE.mean(1) * (E / K)
        p_BE = (score_BSE / score_BSE.sum(-1, keepdim=True)).mean(1)
        return gate_BSE, chosen_BSE.sum((0, 1)), (f_BE * p_BE).sum(-1).mean()


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, E: int, D: int, I: int):  # noqa: E741
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(E, I, D))
        self.up_proj = nn.Parameter(torch.empty(E, I, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, I))

    def forward(self, x_BSD: torch.Tensor, gate_BSE: torch.Tensor) -> torch.Tensor:
        E, I, _ = self.gate_proj.shape  # noqa: E741
        h = F.silu(F.linear(x_BSD, self.gate_proj.flatten(0, 1)))
        h = h * F.linear(x_BSD, self.up_proj.flatten(0, 1))
        h = h.unflatten(-1, (E, I)) * gate_BSE[..., None].to(h.dtype)
        return F.linear(h.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate_BSE, load_E, balance = self.gate(x_BSD)
        return self.experts(x_BSD, gate_BSE) + self.shared_experts(x_BSD), load_E, balance


class Block(nn.Module):
    def __init__(self, c: SimpleNamespace, index: int, dropout: float):
        super().__init__()
        dense = index < c.first_k_dense_replace
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(
        self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), cos, sin)
        x_BSD = x_BSD + F.dropout(y_BSD, self.dropout, self.training)
        y_BSD, load_E, balance = self.post_attention_layernorm(x_BSD), None, None
        if isinstance(self.mlp, MoE):
            y_BSD, load_E, balance = self.mlp(y_BSD)
        else:
            y_BSD = self.mlp(y_BSD)
        return x_BSD + F.dropout(y_BSD, self.dropout, self.training), load_E, balance


def run_block(block: Block, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    """A block as a function, so that one compilation serves all layers of a kind."""
    return block(x_BSD, cos, sin)


class Storyteller(nn.Module):
    """`config` is the content of the checkpoint's config.json."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        c = self.c = SimpleNamespace(**config)
        self.dropout, self.run_block = dropout, run_block
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
                "layers": nn.ModuleList(Block(c, i, dropout) for i in range(c.num_hidden_layers)),
                "norm": nn.RMSNorm(c.hidden_size, c.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        P = c.qk_rope_head_dim
        freq_P = c.rope_parameters["rope_theta"] ** (-torch.arange(0, P, 2).float() / P)
        angle_SP = torch.arange(c.max_position_embeddings)[:, None] * freq_P
        self.register_buffer("cos", angle_SP.cos(), persistent=False)
        self.register_buffer("sin", angle_SP.sin(), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fan-in scaled normal; what writes to the residual stream starts at zero."""
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                p.zero_()
            elif "embed_tokens" in name:
                p.normal_(std=0.25)
            elif p.dim() > 1:
                p.normal_(std=0.5 * p.shape[-1] ** -0.5)

    def forward(self, ids_BS: torch.Tensor):
        """-> hidden_BSD, load_E of each MoE layer, mean sequence-wise balance loss."""
        S = ids_BS.shape[1]
        cos, sin = self.cos[:S], self.sin[:S]
        x_BSD = F.dropout(self.model["embed_tokens"](ids_BS), self.dropout, self.training)
        loads, balances = [], []
        for block in self.model["layers"]:
            run = self.run_block if self.training else run_block
            x_BSD, load_E, balance = run(block, x_BSD, cos, sin)
            if load_E is not None:
                loads.append(load_E)
                balances.append(balance)
        return self.model["norm"](x_BSD), loads, torch.stack(balances).mean()

    def routers(self) -> list[Router]:
        return [m for m in self.modules() if isinstance(m, Router)]

    def export(self) -> dict[str, torch.Tensor]:
        """bf16 tensors under the names of a DeepSeek-V3 checkpoint; the router bias stays fp32."""
        out = {}
        for name, t in self.state_dict().items():
            t = t.cpu() if name.endswith("bias") else t.cpu().bfloat16()
            if ".experts." in name:
                head, proj = name.rsplit(".", 1)
                out |= {f"{head}.{e}.{proj}.weight": w.clone() for e, w in enumerate(t)}
            else:
                out[name] = t.contiguous()
        return out

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of export."""
        state = {}
        for name in self.state_dict():
            if ".experts." in name:
                head, proj = name.rsplit(".", 1)
                experts = range(self.c.n_routed_experts)
                state[name] = torch.stack([tensors[f"{head}.{e}.{proj}.weight"] for e in experts])
            else:
                state[name] = tensors[name]
        self.load_state_dict(state)
