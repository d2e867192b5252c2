"""Which copy of an expert serves a token, and what an expert's capacity drops."""

import numpy as np
import pytest
import torch

from crossdock.balance import linear_placement
from crossdock.balance.reroute import fill_quotas, reroute_quotas
from crossdock.comm import LocalCounts, LocalTransport
from crossdock.core import MoESpec, Placement
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoEWeights, Router, RouterOptions, SlotMap
from crossdock.moe.capacity import keep_heaviest, limit_of
from crossdock.moe.quota import QuotaMap
from crossdock.moe.router import _identity, _one_kernel

CPU = torch.device("cpu")


def build(spec, weight, options, placement=None, bias=None):
    placement = placement or linear_placement(1, spec.num_experts, 1)
    matmul = choose_products(False).matmul
    context = MoEContext(
        0, placement, LocalTransport(False), Recorder(), matmul, False, CPU, torch.float32,
        router=options,
    )  # fmt: skip
    return Router(
        spec, 0, MoEWeights(weight, bias, torch.empty(0), torch.empty(0)), context
    ), context


class Gather:
    """The counts of all ranks, to whoever gives its own."""

    def __init__(self, counts_RE):
        self.counts_RE, self.asked = torch.tensor(counts_RE), []

    def __call__(self, tokens_E):
        self.asked.append(tokens_E.tolist())
        return self.counts_RE


def test_the_nearest_copy_is_taken_and_addresses_stay():
    # Four ranks of three slots on two nodes; rank 1 asks.
    row = np.array([0, 1, 2, 0, 3, 0, 4, 1, 2, 3, 4, 2])
    near = ((1,), (0, 1))
    slot_map = SlotMap(Placement(0, row[None], 5, 4), 0, CPU, near)
    address = slot_map.slots_EM.data_ptr()
    keys = torch.randint(-(2**62), 2**62, (400,))
    ids = torch.arange(5).repeat(400, 1)
    chosen = slot_map(ids, keys).numpy()
    want = [{3, 5}, {1}, {2}, {4}, {6, 10}]  # own rank, own node, own node, own rank, anywhere
    assert [set(chosen[:, e].tolist()) for e in range(5)] == want
    moved = np.array([4, 1, 2, 2, 3, 0, 4, 1, 2, 3, 4, 2])
    slot_map.update(Placement(1, moved[None], 5, 4))
    chosen = slot_map(ids, keys).numpy()
    assert [set(chosen[:, e].tolist()) for e in range(5)] == [{5}, {1}, {3}, {4}, {0}]
    assert slot_map.slots_EM.data_ptr() == address


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("ranks", "experts", "slots"), [(1, 3, 4), (2, 5, 4), (4, 9, 4), (6, 20, 5)]
)
def test_quotas_are_those_of_balance(ranks, experts, slots, on_device):
    rng = np.random.default_rng()
    for _ in range(1 if on_device else 10):
        free = rng.integers(-1, experts, ranks * slots - experts)
        row = rng.permutation(np.concatenate([np.arange(experts), free]))
        placement = Placement(1, row[None], experts, ranks)
        before = Placement(0, rng.permutation(row)[None], experts, ranks)
        popularity = rng.dirichlet(np.full(experts, 0.3))
        ids = [rng.choice(experts, (int(rng.integers(90)), 3), p=popularity) for _ in range(ranks)]
        counts_RE = np.array([np.bincount(i.ravel(), minlength=experts) for i in ids])
        quota_P = fill_quotas(counts_RE.sum(axis=0), row, ranks)
        sent_RP = reroute_quotas(counts_RE, row, quota_P)
        for rank in range(ranks):
            quota_map = QuotaMap(before, 0, rank, CPU, on_device)
            quota_map.update(placement)
            gather = Gather(counts_RE)
            slots_TK = quota_map(torch.tensor(ids[rank]), gather).numpy()
            assert gather.asked == [counts_RE[rank].tolist()]
            np.testing.assert_array_equal(row[slots_TK], ids[rank])
            got_P = np.bincount(slots_TK.ravel(), minlength=ranks * slots)
            np.testing.assert_array_equal(got_P, sent_RP[rank])


def test_quotas_even_out_what_equal_shares_do_not():
    """Half of all tokens want expert 0, whose copies are beside a busy, a calm and an idle one."""
    row = np.array([0, 1, 2, 0, 3, 4, 0, 5])
    tokens_E = np.array([60, 40, 10, 5, 5, 0])
    load_R = fill_quotas(tokens_E, row, 4).reshape(4, 2).sum(axis=1)
    assert load_R.tolist() == [40, 35, 10, 35]


def test_capacity_keeps_the_heaviest_tokens_of_each_expert():
    T, K, E = 50, 3, 6
    ids = torch.rand(T, E).topk(K)[1]
    weights = (torch.rand(T, K) * 8).round() / 8  # many are equal
    limit = limit_of(0.7, T, K, E)
    kept = keep_heaviest(ids, weights, E, limit)
    for expert in range(E):
        at = [(t, k) for t in range(T) for k in range(K) if ids[t, k] == expert]
        at.sort(key=lambda entry: -weights[entry])
        assert [bool(kept[entry]) for entry in at] == [i < limit for i in range(len(at))]
    assert limit_of(1.25, 1, 2, 64) == 1 and limit_of(1.0, 8, 2, 4) == 4


@pytest.mark.parametrize("counts", [None, LocalCounts()])
def test_a_router_with_a_capacity_drops_and_counts(counts):
    spec, x = MoESpec(8, 2, 8, norm_topk_prob=True), torch.randn(40, 16)
    weight = torch.randn(8, 16)
    keys = torch.randint(-(2**62), 2**62, (40,))
    free, _ = build(spec, weight, RouterOptions())
    tight, context = build(spec, weight, RouterOptions(counts=counts, capacity=0.5))
    all_, some = free(x, keys), tight(x, keys)
    dropped = some.slots_TK < 0
    assert torch.equal(some.slots_TK[~dropped], all_.slots_TK[~dropped])
    assert torch.equal(some.weights_TK, all_.weights_TK.masked_fill(dropped, 0.0))
    used = torch.bincount(some.slots_TK[~dropped], minlength=8)
    wanted = torch.bincount(all_.slots_TK.view(-1), minlength=8)
    assert torch.equal(used, wanted.clamp(max=limit_of(0.5, 40, 2, 8)))
    assert context.load.dropped_L.tolist() == [int(dropped.sum())] and dropped.any()
    assert torch.equal(context.load.tokens_LE[0], wanted)  # what was asked for
    wide, context = build(spec, weight, RouterOptions(counts=counts, capacity=8.0))
    assert torch.equal(wide(x, keys).slots_TK, all_.slots_TK)
    assert context.load.dropped_L.tolist() == [0]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_decides_the_choice_alone(scoring, biased):
    spec, x = MoESpec(8, 2, 8, scoring, correction_bias=biased), torch.randn(60, 16)
    weight, bias = torch.randn(8, 16), torch.randn(8) * 0.05 if biased else None
    plain, _ = build(spec, weight, RouterOptions(), bias=bias)
    adjusted, _ = build(spec, weight, RouterOptions(adjusted=True), bias=bias)
    for got, want in zip(adjusted.choose(x), plain.choose(x), strict=True):
        assert torch.equal(got, want)  # not adjusted yet
    adjusted.bias_E[3] += 2.0
    ids, weights = adjusted.choose(x)
    assert (ids == 3).any(dim=1).all()
    scores = plain._scores(x @ weight.T)
    torch.testing.assert_close(weights, scores.gather(1, ids))
    assert bias is None or plain.bias_E is bias


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_one_kernel_gives_experts_where_more_is_done_with_them(scoring):
    """As on a GPU, with a bias that has been adjusted."""
    torch.manual_seed(0)  # of other draws, some have a choice so close that rounding decides it
    spec, x = MoESpec(12, 3, 8, scoring, norm_topk_prob=True), torch.randn(20, 16)
    route, _ = build(spec, torch.randn(12, 16), RouterOptions(adjusted=True, capacity=0.8))
    route.bias_E.copy_(torch.randn(12) * 0.1)
    counts_E = torch.zeros(12, dtype=torch.int64)
    kernel = _one_kernel(spec, _identity(12, CPU), route.bias_E, counts_E)
    ids, weights = kernel(route._logits(x), torch.randint(-(2**62), 2**62, (20,)), None)
    want_ids, want_weights = route.choose(x)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(counts_E, torch.bincount(ids.view(-1), minlength=12))


def test_quotas_leave_out_empty_rows_and_follow_a_new_placement():
    """As on a GPU: one kernel chooses experts, others count them and choose copies. Of two ranks;
    the other's tokens all want what is chosen here most."""
    torch.manual_seed(0)
    spec, weight = MoESpec(6, 2, 8), torch.randn(6, 16)
    row = np.array([0, 1, 2, 3, 4, 5, 2, 1])
    before = Placement(0, row[None], 6, 2)
    route, _ = build(spec, weight, RouterOptions(), before)
    route._in_one_kernel = _one_kernel(spec, _identity(6, CPU), None, route.tokens_E)
    route._quota_map, route._by_map = QuotaMap(before, 0, 0, CPU, on_device=True), False
    copies = route._quota_map.copies
    addresses = [t.data_ptr() for t in (copies.slot_ER, copies.waves_EL, copies.num_waves)]
    for n, rows in enumerate((20, 7, 0, 13)):
        route._counts = OtherRank()
        x, keys = torch.randn(20, 16), torch.zeros(20, dtype=torch.int64)
        placement = Placement(n + 1, np.random.default_rng().permutation(row)[None], 6, 2)
        route.place(placement)
        counted_E = route.tokens_E.clone()
        got = route(x, keys, torch.tensor([rows], dtype=torch.int32))
        ids_TK, _ = route.choose(x)
        ids_TK[rows:] = -1
        own_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=6)
        assert route._counts.asked == [own_E.tolist()]
        assert torch.equal(route.tokens_E - counted_E, own_E)
        twin = QuotaMap(placement, 0, 0, CPU)
        assert torch.equal(got.slots_TK, twin(ids_TK, OtherRank().gather))
        assert (got.slots_TK[rows:] == -1).all() and not got.weights_TK[rows:].any()
    assert addresses == [t.data_ptr() for t in (copies.slot_ER, copies.waves_EL, copies.num_waves)]


class OtherRank:
    """Counts of two ranks, the second of which wants what the first wants most, ten times."""

    def __init__(self):
        self.asked = []

    def gather(self, tokens_E):
        self.asked.append(tokens_E.tolist())
        other_E = torch.where(tokens_E == tokens_E.max(), 10, 0).to(tokens_E.dtype)
        return torch.stack([tokens_E, other_E])
