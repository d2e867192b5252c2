"""The router in one kernel against the torch router: the same experts, replicas and counts."""

import numpy as np
import pytest
import torch

from crossdock.balance import linear_placement
from crossdock.core import MoESpec, Placement
from crossdock.kernels.router import ReplicaMap, RouterRule, route
from crossdock.moe import router as torch_router

SPECS = {
    "mixtral": MoESpec(8, 2, 8, norm_topk_prob=True),
    "qwen3": MoESpec(128, 8, 8, norm_topk_prob=True),
    "v2": MoESpec(160, 6, 8, num_groups=8, topk_groups=3, group_score="max",
                  routed_scaling_factor=16.0),
    "v3": MoESpec(256, 8, 8, scoring="sigmoid", num_groups=8, topk_groups=4, correction_bias=True,
                  norm_topk_prob=True, routed_scaling_factor=2.5),
    "kimi": MoESpec(384, 8, 8, scoring="sigmoid", correction_bias=True, norm_topk_prob=True,
                    routed_scaling_factor=2.827),
}  # fmt: skip


def rule_of(spec: MoESpec) -> RouterRule:
    return RouterRule(
        spec.top_k, spec.scoring, spec.num_groups, spec.topk_groups, spec.group_score,
        spec.norm_topk_prob, spec.routed_scaling_factor,
    )  # fmt: skip


class Choose(torch_router.Router):
    """The torch router from its logits on."""

    def __init__(self, spec, bias, device):
        self.spec, self.bias_E, self.router_EH, self._invariant = spec, bias, None, False
        self._logits = lambda logits_TE: logits_TE
        self._low_bits_E = torch.arange(spec.num_experts - 1, -1, -1, device=device)


def replica_map(slot_map: torch_router.SlotMap) -> ReplicaMap:
    return ReplicaMap(slot_map.slots_EM, slot_map.count_E, slot_map.salt, torch_router._MIX)


@pytest.mark.parametrize("name", SPECS)
def test_as_the_torch_router(device, name):
    spec, T = SPECS[name], 48
    E = spec.num_experts
    logits = torch.randn(T, E, device=device)
    logits[0] = 0.5  # all equal
    logits[1] = logits[1].round()  # many ties
    bias = torch.randn(E, device=device) * 0.2 if spec.correction_bias else None
    if bias is not None:
        bias[: E // 2] = bias[0]
    keys = torch.randint(-(2**63), 2**63 - 1, (T,), device=device)
    placement = linear_placement(3, E, 2, 2 * E)
    slot_map = torch_router.SlotMap(placement, 2, device)
    counts = torch.zeros(E, dtype=torch.int64, device=device)
    slots, weights = route(logits, keys, rule_of(spec), replica_map(slot_map), counts, bias)
    ids, want_weights = Choose(spec, bias, device).choose(logits)
    assert torch.equal(slots, slot_map(ids, keys))
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=E))


def test_empty_rows_have_no_slot_and_are_not_counted(device):
    spec = SPECS["mixtral"]
    logits = torch.randn(7, 8, device=device)
    slot_map = torch_router.SlotMap(Placement(0, np.arange(8)[None].repeat(1, 0), 8, 1), 0, device)
    counts = torch.full((8,), 5, dtype=torch.int64, device=device)
    rows = torch.tensor([3], dtype=torch.int32, device=device)
    keys = torch.arange(7, device=device)
    slots, weights = route(logits, keys, rule_of(spec), replica_map(slot_map), counts, rows=rows)
    assert (slots[3:] == -1).all() and (weights[3:] == 0).all()
    assert torch.equal(slots[:3], logits[:3].topk(2)[1])
    assert torch.equal(counts - 5, torch.bincount(slots[:3].flatten(), minlength=8))


def test_groups_that_do_not_divide_are_refused(device):
    spec = RouterRule(2, num_groups=3, topk_groups=1)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="8 experts do not divide into 3 groups"):
        route(torch.zeros(1, 8, device=device), one, spec, ReplicaMap(one, one, 0, 0), one)
