"""Which experts a token goes to, with which weights, and which physical slot serves it.

Scores and choice: DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437,
section 2.1.2), Qwen3-MoE, Mixtral, OLMoE; differences are fields of `MoESpec`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from crossdock.core import MoESpec, Placement, Routing, parse_routing
from crossdock.kernels.host_copy import copy_from_host
from crossdock.moe.capacity import keep_heaviest, limit_of
from crossdock.moe.context import MoEContext, MoEWeights
from crossdock.moe.quota import QuotaMap

_ID_BITS = 16
_SORTED_SCORES = 1024
"""Measured on the CPU: up to 32 tokens of 32 experts."""
# Odd 63-bit constants: the replica hash is a multiply-shift over (request, position) and layer.
_MIX, _MIX_LAYER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


class Router:
    def __init__(self, spec: MoESpec, index: int, weights: MoEWeights, context: MoEContext):
        if spec.num_experts > 1 << _ID_BITS:
            raise ValueError(f"at most {1 << _ID_BITS} experts, got {spec.num_experts}")
        self.spec = spec
        self.router_EH, self.bias_E = weights.router_EH, weights.bias_E
        options, device = context.router, context.device
        if options.adjusted:
            zero_E = weights.router_EH.new_zeros(spec.num_experts)
            self.bias_E = zero_E if weights.bias_E is None else weights.bias_E + zero_E
        self.slot_map = SlotMap(context.placement, index, device, options.near)
        self._invariant, self._recorder = context.invariant, context.recorder
        self._logits = _choose_logits(weights.router_EH, context)
        self.tokens_E = context.load.tokens_LE[index]
        self._capacity, self._dropped = options.capacity, context.load.dropped_L[index]
        self._counts, self._quota_map = options.counts, None
        if options.counts is not None:
            on_device = device.type == "cuda"
            self._quota_map = QuotaMap(context.placement, index, context.rank, device, on_device)
            dtype = torch.int32 if on_device else torch.int64
            self._no_tokens_E = torch.zeros(spec.num_experts, dtype=dtype, device=device)
        self._by_map = self._quota_map is None and self._capacity is None
        self._in_one_kernel = None
        if device.type == "cuda":  # a token's results there depend on the token alone
            slot_map = self.slot_map if self._by_map else _identity(spec.num_experts, device)
            self._in_one_kernel = _one_kernel(spec, slot_map, self.bias_E, self.tokens_E)
        # Among equal scores the lowest id wins, so it gets the highest low bits of the key.
        self._low_bits_E = torch.arange(spec.num_experts - 1, -1, -1, device=device)
        self._nothing = Routing(
            torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
            torch.empty(0, spec.top_k, device=device),
        )

    def __call__(self, x_TH: Tensor, keys_T: Tensor, rows_1: Tensor | None = None) -> Routing:
        """
        Args:
            keys_T: int64, a hash of (request, position).
            rows_1: int32 on a GPU; rows from there on go to no expert.
        """
        if self._in_one_kernel is not None:
            ids_TK, weights_TK = self._in_one_kernel(self._logits(x_TH), keys_T, rows_1)
            if self._by_map:  # they are slots already
                return Routing(ids_TK, weights_TK)
        else:
            assert rows_1 is None
            ids_TK, weights_TK = self.choose(x_TH)
            ids = ids_TK.view(-1)
            self.tokens_E.scatter_add_(0, ids, torch.ones_like(ids))
        if self._by_map:
            return Routing(self.slot_map(ids_TK, keys_T), weights_TK)
        if self._capacity is not None:
            E = self.spec.num_experts
            limit = limit_of(self._capacity, ids_TK.shape[0], ids_TK.shape[1], E)
            over_TK = ~keep_heaviest(ids_TK, weights_TK, E, limit)
            self._dropped += over_TK.sum()
            ids_TK, weights_TK = ids_TK.masked_fill(over_TK, -1), weights_TK.masked_fill(over_TK, 0)
        if self._quota_map is not None:
            return Routing(self._quota_map(ids_TK, self._gather), weights_TK)
        slots_TK = self.slot_map(ids_TK.clamp(min=0), keys_T)
        return Routing(slots_TK.masked_fill_(ids_TK < 0, -1), weights_TK)

    @property
    def gathers(self) -> bool:
        """Whether all ranks must call it, or `nothing`, in each exchange of rows."""
        return self._quota_map is not None

    def nothing(self) -> Routing:
        """Of no tokens."""
        if self.gathers:
            self._gather(self._no_tokens_E)
        return self._nothing

    def place(self, placement: Placement) -> None:
        """Between steps; `placement` has the same shape as the one before."""
        self.slot_map.update(placement)
        if self._quota_map is not None:
            self._quota_map.update(placement)

    def _gather(self, tokens_E: Tensor) -> Tensor:
        """`tokens_RE` of this exchange."""
        assert self._counts is not None
        with self._recorder.span("counts"):
            return self._counts.gather(tokens_E)

    def choose(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """`(ids_TK, weights_TK)`: logical experts by falling score, and their fp32 weights."""
        spec, bias_E = self.spec, self.bias_E
        scores_TE = self._scores(self._logits(x_TH))
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if spec.num_groups > 1:
            choice_TE = self._within_groups(choice_TE)
        ids_TK = self._top(choice_TE, spec.top_k)
        weights_TK = scores_TE.gather(1, ids_TK)
        if spec.norm_topk_prob:
            # cumsum adds one after the other; a sum's order is the kernel's choice. The small
            # number is DeepSeek-V3's guard, below rounding in any other case.
            weights_TK = weights_TK / (weights_TK.cumsum(1)[:, -1:] + 1e-20)
        if spec.routed_scaling_factor != 1.0:
            weights_TK = weights_TK * spec.routed_scaling_factor
        return ids_TK, weights_TK

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.spec.scoring == "softmax":
            return logits_TE.softmax(dim=-1)
        if self._invariant:
            # torch's sigmoid takes another path for the last elements of a tensor.
            return logits_TE.neg().exp_().add_(1.0).reciprocal_()
        return logits_TE.sigmoid()

    def _within_groups(self, choice_TE: Tensor) -> Tensor:
        """-inf for the experts outside the best groups."""
        spec = self.spec
        choice_TGE = choice_TE.view(
            choice_TE.shape[0], spec.num_groups, spec.num_experts // spec.num_groups
        )
        if spec.group_score == "max":
            groups_TG = choice_TGE.amax(dim=-1)
        else:
            first_TG, second_TG = choice_TGE.topk(2, dim=-1)[0].unbind(-1)
            groups_TG = first_TG + second_TG
        best = self._top(groups_TG, spec.topk_groups)
        drop_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, best, False)
        return choice_TGE.masked_fill(drop_TG.unsqueeze(-1), float("-inf")).view_as(choice_TE)

    def _top(self, scores_TE: Tensor, k: int) -> Tensor:
        """Indices of the k largest, ties to the lowest index, which torch.topk does not promise.

        A stable sort does that fastest for a decode step's scores. For more, one integer key per
        score: a float's bits, read as an integer, sort like the float where it is positive, and
        negative ones with their lower bits turned. The index below makes every key different.
        """
        if scores_TE.numel() <= _SORTED_SCORES:
            return scores_TE.sort(dim=-1, descending=True, stable=True)[1][:, :k].contiguous()
        bits_TE = scores_TE.view(torch.int32)
        if self.bias_E is not None:  # else no score is negative but the -inf of groups
            bits_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
        low_bits = self._low_bits_E[-scores_TE.shape[1] :]
        keys_TE = (bits_TE.long() << _ID_BITS).add_(low_bits)
        return keys_TE.topk(k, dim=-1)[1]


def _choose_logits(router_EH: Tensor, context: MoEContext) -> Callable[[Tensor], Tensor]:
    """float32 logits. On CUDA the tensor cores do it wherever the weights are BF16 in truth, as
    checkpoints store them: products of BF16 are exact in float32, and a float32 product takes ten
    times as long (294 us for 4,096 tokens of width 7,168 and 256 experts on an H200)."""
    logits: Callable[[Tensor], Tensor]
    narrow_EH = router_EH.bfloat16()
    on_cuda = context.device.type == "cuda" and context.dtype == torch.bfloat16
    if on_cuda and not context.invariant and torch.equal(narrow_EH.float(), router_EH):
        logits = lambda x_TH: torch.mm(x_TH, narrow_EH.t(), out_dtype=torch.float32)  # noqa: E731
    else:
        logits = lambda x_TH: context.matmul(x_TH.float(), router_EH, None)  # noqa: E731
    exponent = parse_routing(context.routing)
    return logits if exponent is None else _drawn(logits, exponent, router_EH.shape[0])


def _drawn(
    logits: Callable[[Tensor], Tensor], exponent: float, experts: int
) -> Callable[[Tensor], Tensor]:
    """Logits whose top k are k experts drawn without replacement by popularity (Gumbel's trick;
    arXiv 1903.06059, section 3). The router's own are computed too: they cost what they would."""

    def draw(x_TH: Tensor) -> Tensor:
        noise_TE = torch.rand_like(logits(x_TH))
        if exponent == 0:
            return noise_TE
        rank_E = torch.arange(1, experts + 1, device=x_TH.device, dtype=torch.float32)
        return -exponent * rank_E.log() - (-noise_TE.clamp_(1e-9, 1 - 1e-7).log_()).log_()

    return draw


def _one_kernel(
    spec: MoESpec, slot_map: "SlotMap", bias_E: Tensor | None, tokens_E: Tensor
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """(logits_TE, keys_T, rows_1 or None) to (slots_TK, weights_TK), as `choose` and `SlotMap` give
    them."""
    from crossdock.kernels.router import ReplicaMap, RouterRule, route

    rule = RouterRule(
        spec.top_k,
        spec.scoring,
        spec.num_groups,
        spec.topk_groups,
        spec.group_score,
        spec.norm_topk_prob,
        spec.routed_scaling_factor,
    )
    replicas = ReplicaMap(slot_map.slots_EM, slot_map.count_E, slot_map.salt, _MIX)
    return lambda logits_TE, keys_T, rows_1: route(
        logits_TE, keys_T, rule, replicas, tokens_E, bias_E, rows_1
    )


def _identity(experts: int, device: torch.device) -> "SlotMap":
    """Each expert's slot is its number."""
    return SlotMap(Placement(0, np.arange(experts)[None], experts, 1), 0, device)


class SlotMap:
    """Logical expert to physical slot of one layer, at fixed addresses; a token's replica is chosen
    by a hash of its key and the layer, among those on the first of the sets of ranks `near` that
    has any, or else among all."""

    def __init__(
        self,
        placement: Placement,
        index: int,
        device: torch.device,
        near: Sequence[Sequence[int]] = (),
    ):
        self._near = near
        self._index, self.salt = index, _MIX_LAYER * (index + 1) & (1 << 62) - 1
        experts, slots = placement.num_experts, placement.slot_expert_LP.shape[1]
        self._width = slots - experts + 1  # the most replicas any placement of this size can have
        self.slots_EM = torch.zeros(experts, self._width, dtype=torch.int64, device=device)
        self.count_E = torch.ones(experts, dtype=torch.int64, device=device)
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Between steps; `placement` has the same shape as the one before."""
        slots_EM, count_E = placement.replicas(self._index)
        if len(count_E) != len(self.count_E) or slots_EM.shape[1] > self._width:
            raise ValueError(f"placement {placement.epoch} has another number of experts or slots")
        if self._near:
            slots_EM, count_E = self._nearest(slots_EM, count_E, placement.slots_per_rank)
        copy_from_host(self.slots_EM[:, : slots_EM.shape[1]], slots_EM)
        copy_from_host(self.count_E, count_E)

    def _nearest(
        self, slots_EM: np.ndarray, count_E: np.ndarray, slots_per_rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        slots_EM, count_E = slots_EM.copy(), count_E.copy()
        for expert, count in enumerate(count_E.tolist()):
            all_ = slots_EM[expert, :count]
            for ranks in self._near:
                there = all_[np.isin(all_ // slots_per_rank, ranks)]
                if there.size:
                    slots_EM[expert] = np.resize(there, slots_EM.shape[1])
                    count_E[expert] = there.size
                    break
        return slots_EM, count_E

    def __call__(self, ids_TK: Tensor, keys_T: Tensor) -> Tensor:
        ids = ids_TK.view(-1)
        if self._width == 1:
            return self.slots_EM.view(-1).index_select(0, ids).view_as(ids_TK)
        hash_T = ((keys_T ^ self.salt) * _MIX) >> 33
        hash_T = hash_T & 0x3FFFFFFF
        pick_TK = hash_T.unsqueeze(1) % self.count_E.index_select(0, ids).view_as(ids_TK)
        cell = ids_TK * self._width + pick_TK
        return self.slots_EM.view(-1).index_select(0, cell.view(-1)).view_as(ids_TK)
