import numpy as np
import pytest
import torch

from crossdock.comm import LocalTransport
from crossdock.core import MoESpec, Placement
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoEWeights, Router, SlotMap

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    """Of other draws, one of some thousand has a choice so close that rounding decides it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def context(placement, invariant=False):
    matmul = choose_products(invariant).matmul
    transport = LocalTransport(invariant)
    return MoEContext(0, placement, transport, Recorder(), matmul, invariant, CPU, torch.float32)


def placed(experts, layers=1):
    return Placement(0, np.tile(np.arange(experts), (layers, 1)), experts, 1)


def router(spec, weight, bias=None, invariant=False):
    weights = MoEWeights(weight, bias, torch.empty(0), torch.empty(0))
    return Router(spec, 0, weights, context(placed(spec.num_experts), invariant))


def parity(name):
    """(our spec, whether there is a bias, transformers' router) of one architecture's routing."""
    from transformers.models import deepseek_v2, deepseek_v3, mixtral, olmoe, qwen3_moe

    E, K, H = 16, 4, 64
    spec = {"num_experts": E, "top_k": K, "intermediate_size": 8}
    common = {"hidden_size": H, "num_experts_per_tok": K}
    if name == "v2 greedy":
        config = deepseek_v2.DeepseekV2Config(
            **common, n_routed_experts=E, topk_method="greedy", routed_scaling_factor=1.7
        )
        theirs = deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
        return MoESpec(**spec, routed_scaling_factor=1.7), theirs
    if name == "v2 groups":
        config = deepseek_v2.DeepseekV2Config(
            **common, n_routed_experts=E, topk_method="group_limited_greedy", n_group=4,
            topk_group=2, routed_scaling_factor=16.0,
        )  # fmt: skip
        theirs = deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
        groups = {"num_groups": 4, "topk_groups": 2, "group_score": "max"}
        return MoESpec(**spec, **groups, routed_scaling_factor=16.0), theirs
    if name.startswith("v3"):
        norm = name == "v3"
        config = deepseek_v3.DeepseekV3Config(
            **common, n_routed_experts=E, n_group=4, topk_group=2, norm_topk_prob=norm,
            routed_scaling_factor=2.5,
        )  # fmt: skip
        theirs = deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
        return MoESpec(
            **spec, scoring="sigmoid", num_groups=4, topk_groups=2, correction_bias=True,
            norm_topk_prob=norm, routed_scaling_factor=2.5,
        ), theirs  # fmt: skip
    if name == "mixtral":
        config = mixtral.MixtralConfig(**common, num_local_experts=E)
        theirs = mixtral.modeling_mixtral.MixtralTopKRouter(config)
        return MoESpec(**spec, norm_topk_prob=True), theirs
    norm = name.endswith("norm")
    if name.startswith("qwen3"):
        config = qwen3_moe.Qwen3MoeConfig(**common, num_experts=E, norm_topk_prob=norm)
        theirs = qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(config)
    else:
        config = olmoe.OlmoeConfig(**common, num_experts=E, norm_topk_prob=norm)
        theirs = olmoe.modeling_olmoe.OlmoeTopKRouter(config)
    return MoESpec(**spec, norm_topk_prob=norm), theirs


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    "name",
    ["v2 greedy", "v2 groups", "v3", "v3 plain", "mixtral", "qwen3 norm", "qwen3", "olmoe norm",
     "olmoe"],
)  # fmt: skip
def test_routers_agree_with_transformers(name, invariant):
    spec, theirs = parity(name)
    torch.nn.init.normal_(theirs.weight)
    bias = None
    if spec.correction_bias:
        bias = theirs.e_score_correction_bias.normal_(std=0.5)
    x = torch.randn(50, theirs.weight.shape[1])
    _, expected, expected_ids = theirs(x)
    ids, weights = router(spec, theirs.weight.data, bias, invariant).choose(x)
    ours, order = ids.sort(dim=1)
    wanted, wanted_order = expected_ids.sort(dim=1)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    torch.testing.assert_close(
        weights.gather(1, order), expected.gather(1, wanted_order), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_ties_take_the_lowest_id(scoring, groups):
    """Experts of a few distinct router rows, so that most scores are equal to the bit."""
    E, K, H = 24, 5, 12
    bias_E = (
        torch.tensor([-2.0, 0.25, -2.0])[torch.randint(3, (E,))] if scoring == "sigmoid" else None
    )
    # Whole numbers: the products are exact, whatever the order of their sums.
    weight = torch.randint(-2, 3, (3, H)).float()[torch.randint(3, (E,))]
    spec = MoESpec(
        E, K, 8, scoring, groups, 2 if groups > 1 else 1, correction_bias=bias_E is not None
    )
    route = router(spec, weight, bias_E)
    x = torch.randint(-1, 2, (60, H)).float()
    ids = route.choose(x)[0].numpy()
    scores = route._scores(x @ weight.T).numpy()
    choice = scores if bias_E is None else scores + bias_E.numpy()
    for row, got in zip(choice, ids, strict=True):
        allowed = np.arange(E)
        if groups > 1:
            parts = np.sort(row.reshape(groups, -1), axis=1)
            value = parts[:, -1] + parts[:, -2]
            best = np.lexsort((np.arange(groups), -value))[:2]
            allowed = np.flatnonzero(np.isin(allowed // (E // groups), best))
        expected = allowed[np.lexsort((allowed, -row[allowed]))][:K]
        np.testing.assert_array_equal(got, expected)
    assert route.choose(x[:0])[0].shape == (0, K)
    # Few scores are sorted, many are not: the same choice either way.
    choice = torch.from_numpy(choice)
    pieces = [route._top(part, K) for part in choice.split(7)]
    assert torch.equal(torch.cat(pieces), route._top(choice, K))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [7, 24, 32])
def test_invariant_routing_does_not_depend_on_other_rows(scoring, experts):
    spec = MoESpec(experts, 3, 8, scoring, norm_topk_prob=True, routed_scaling_factor=2.5)
    route = router(spec, torch.randn(experts, 33), invariant=True)
    x = torch.randn(67, 33)
    ids, weights = route.choose(x)
    for rows in (range(1), range(5, 8), range(66, 67), range(3, 40)):
        some_ids, some_weights = route.choose(x[rows])
        assert torch.equal(some_ids, ids[rows]) and torch.equal(some_weights, weights[rows])


def test_replicas_share_the_tokens_of_their_expert():
    slots = np.array([[0, 1, 2, 0, -1, 0, 2, -1]] * 3)
    placement = Placement(0, slots, 3, 2)
    maps = [SlotMap(placement, index, CPU) for index in range(3)]
    keys = torch.randint(-(2**62), 2**62, (6000,))
    ids = torch.randint(3, (6000, 2))
    picks = [slot_map(ids, keys) for slot_map in maps]
    for pick in picks:
        assert np.array_equal(slots[0][pick.numpy()], ids.numpy())
        used = torch.bincount(pick.view(-1), minlength=8)
        share = used[[0, 3, 5]] / (ids == 0).sum()
        assert ((share > 0.28) & (share < 0.39)).all()
        # The same key has the same replica, whatever else is in the batch.
        assert torch.equal(maps[0](ids[100:103], keys[100:103]), picks[0][100:103])
    assert not torch.equal(picks[0], picks[1])


def test_a_new_placement_keeps_the_addresses():
    first = Placement(0, np.array([[0, 1, 2, 0]]), 3, 2)
    slot_map = SlotMap(first, 0, CPU)
    address = slot_map.slots_EM.data_ptr(), slot_map.count_E.data_ptr()
    slot_map.update(Placement(1, np.array([[2, 2, 1, 0]]), 3, 2))
    assert address == (slot_map.slots_EM.data_ptr(), slot_map.count_E.data_ptr())
    got = slot_map(torch.tensor([[0, 1]]), torch.tensor([5]))
    assert got.tolist() == [[3, 2]]
    with pytest.raises(ValueError, match="another number of experts"):
        slot_map.update(Placement(2, np.array([[0, 1, 2, 3]]), 4, 2))
