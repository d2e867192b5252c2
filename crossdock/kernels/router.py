# mypy: disable-error-code="no-untyped-def"
"""From router logits to physical slots in one launch: scores, groups, top-k, replicas, load.

Scores and choice are those of `moe.router`, which is torch's form of all this: DeepSeek-V2 (arXiv
2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), Qwen3-MoE, Mixtral, OLMoE.
A program takes one token; its experts lie in a tile of groups by experts of a group.

    logits (1, 3, 3, 0), K = 2, softmax: experts (1, 2), the lower id first where scores are equal
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

_NONE = tl.constexpr(-(1 << 62))


@dataclass(frozen=True)
class RouterRule:
    """As in `core.MoESpec`."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, eq=False)
class ReplicaMap:
    """Physical slots of each logical expert: slots_EM int64, count_E int64 (how many of its M are
    in use). A token's replica is `hash(key ^ salt, mix) % count`, a multiply-shift."""

    slots_EM: Tensor
    count_E: Tensor
    salt: int
    mix: int


@triton.jit
def _sort_key(score, low_bits):
    """int64 that sorts as the score does, ties by `low_bits`, all different."""
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 16) | low_bits.to(tl.int64)


@triton.jit
def _best_groups(choice, inside, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr,
                 TOP2: tl.constexpr, BLOCK_G: tl.constexpr):  # fmt: skip
    """1 for the groups [BLOCK_G] that may be chosen from."""
    first = tl.max(choice, axis=1)
    group = tl.arange(0, BLOCK_G)
    if TOP2:
        column = tl.broadcast_to(tl.arange(0, choice.shape[1])[None, :], choice.shape)
        at = tl.min(tl.where(inside & (choice == first[:, None]), column, SIZE), axis=1)
        rest = tl.where(column == at[:, None], -float("inf"), choice)
        first = first + tl.max(rest, axis=1)
    key = _sort_key(first, GROUPS - 1 - group)
    key = tl.where(group < GROUPS, key, _NONE)
    chosen = tl.zeros((BLOCK_G,), tl.int32)
    for _ in tl.static_range(TOP):
        best = tl.max(key, axis=0)
        chosen = tl.where(key == best, 1, chosen)
        key = tl.where(key == best, _NONE, key)
    return chosen


@triton.jit
def _router_kernel(
    logits_ptr, bias_ptr, keys_ptr, slots_EM_ptr, count_ptr, tokens_ptr, rows_ptr, slots_ptr,
    weights_ptr, stride_t, salt, mix, replicas, factor, EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    group = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + column[None, :]
    inside = (group < GROUPS)[:, None] & (column < SIZE)[None, :]
    at = logits_ptr + t.to(tl.int64) * stride_t + expert
    logits = tl.load(at, mask=inside, other=-float("inf"))
    if SIGMOID:
        scores = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))
    else:
        weight = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        total = tl.sum(tl.sum(weight, axis=1), axis=0)
        scores = tl.div_rn(weight, tl.zeros_like(weight) + total)
    choice = scores
    if BIAS:
        choice = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, -float("inf"))
    if GROUPS > 1:
        chosen = _best_groups(choice, inside, SIZE, GROUPS, TOP_GROUPS, TOP2, BLOCK_G)
        choice = tl.where((chosen > 0)[:, None], choice, -float("inf"))
    key = tl.where(inside, _sort_key(choice, EXPERTS - 1 - expert), _NONE)
    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    total = 0.0
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.max(key, axis=1), axis=0)
        this = key == best
        weight = tl.sum(tl.sum(tl.where(this, scores, 0.0), axis=1), axis=0)
        ids = tl.where(k == i, EXPERTS - 1 - (best & 0xFFFF).to(tl.int32), ids)
        weights = tl.where(k == i, weight, weights)
        total += weight  # one after the other, as the torch form
        key = tl.where(this, _NONE, key)
    if NORM:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (total + 1e-20))
    weights = weights * factor
    used = k < TOP_K
    live = used
    if ROWS:
        live = used & (t < tl.load(rows_ptr))
    # The same hash as a multiply-shift in torch: int64 that wraps around, 30 bits of it.
    mixed = (tl.load(keys_ptr + t) ^ salt) * mix
    count = tl.load(count_ptr + ids, mask=used, other=1)
    pick = ((mixed >> 33) & 0x3FFFFFFF) % count
    slot = tl.load(slots_EM_ptr + ids.to(tl.int64) * replicas + pick, mask=used, other=-1)
    out = t.to(tl.int64) * TOP_K + k
    tl.store(slots_ptr + out, tl.where(live, slot, -1), mask=used)
    tl.store(weights_ptr + out, tl.where(live, weights, 0.0), mask=used)
    tl.atomic_add(tokens_ptr + ids, tl.full((BLOCK_K,), 1, tl.int64), mask=live, sem="relaxed")


def route(
    logits_TE: Tensor,
    keys_T: Tensor,
    rule: RouterRule,
    replicas: ReplicaMap,
    tokens_E: Tensor,
    bias_E: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(slots_TK int64, weights_TK fp32)`, by falling score.

    Args:
        logits_TE: fp32. keys_T: int64, a hash of (request, position).
        tokens_E: int64; the tokens of each logical expert are added to it.
        bias_E: fp32, added to the scores for the choice alone.
        rows: int [1] on the device; rows from there on are empty: slot -1, weight 0, not counted.

    Raises:
        ValueError: experts that do not divide into the groups, or more than 65,536 of them.
    """
    T, E = logits_TE.shape
    if E % rule.num_groups or E > 1 << 16:
        raise ValueError(
            f"{E} experts do not divide into {rule.num_groups} groups, or are more than {1 << 16}"
        )
    slots_TK = torch.empty(T, rule.top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(T, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    if T == 0:
        return slots_TK, weights_TK
    size = E // rule.num_groups
    _router_kernel[(T,)](
        logits_TE, logits_TE if bias_E is None else bias_E, keys_T, replicas.slots_EM,
        replicas.count_E, tokens_E, tokens_E if rows is None else rows, slots_TK, weights_TK,
        logits_TE.stride(0), replicas.salt, replicas.mix, replicas.slots_EM.stride(0),
        rule.routed_scaling_factor, EXPERTS=E, GROUPS=rule.num_groups, SIZE=size,
        TOP_GROUPS=rule.topk_groups, TOP2=rule.group_score == "top2", TOP_K=rule.top_k,
        SIGMOID=rule.scoring == "sigmoid", BIAS=bias_E is not None, NORM=rule.norm_topk_prob,
        ROWS=rows is not None, BLOCK_G=triton.next_power_of_2(rule.num_groups),
        BLOCK_S=triton.next_power_of_2(size), BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=1 if E <= 256 else 2,
    )  # fmt: skip
    return slots_TK, weights_TK
