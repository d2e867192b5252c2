"""Permute, experts and unpermute on one rank, against a dense float64 reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.comm import LocalTransport
from crossdock.core import MoESpec, Placement, Rows
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoEWeights, build_moe_layer
from crossdock.moe.experts.rows import GroupedProduct, SlotBySlot

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def build(slots, hidden, width, top_k, per_expert, dtype=torch.float32):
    placement = Placement(0, np.arange(slots)[None], slots, 1)
    matmul = choose_products(per_expert).matmul
    context = MoEContext(
        0, placement, LocalTransport(per_expert), Recorder(), matmul, per_expert, CPU, dtype
    )
    weights = MoEWeights(
        torch.randn(slots, hidden),
        None,
        (torch.randn(slots, 2 * width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(slots, hidden, width) / width**0.5).to(dtype),
    )
    return build_moe_layer(MoESpec(slots, top_k, width), 0, weights, None, context), weights


def dense(received, weights, per_expert):
    gate_up, down = weights.gate_up_SFH.double(), weights.down_SHF.double()
    N, K = received.slots_NK.shape
    y = torch.zeros(N, K, down.shape[1], dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            slot = int(received.slots_NK[n, k])
            if slot >= 0:
                gate, up = (gate_up[slot] @ received.x_NH[n].double()).chunk(2)
                y[n, k] = down[slot] @ (gate * gate.sigmoid() * up)
    return y if per_expert else (y * received.weights_NK.double().unsqueeze(-1)).sum(1)


@settings(max_examples=60, deadline=None)
@given(
    N=st.sampled_from([0, 1, 2, 7, 40]),
    slots=st.integers(1, 9),
    top_k=st.sampled_from([1, 2, 4, 16]),
    shape=st.sampled_from([(16, 8), (33, 5), (12, 20)]),
    per_expert=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    pieces=st.booleans(),
)
def test_experts_equal_a_dense_reference(
    N, slots, top_k, shape, per_expert, dtype, density, pieces
):
    with torch.inference_mode():
        layer, weights = build(slots, *shape, min(top_k, slots), per_expert, dtype)
        if pieces:
            layer.experts.rows_at_once = 3
        slots_NK = torch.randint(slots, (N, top_k)).masked_fill(torch.rand(N, top_k) > density, -1)
        weights_NK = torch.rand(N, top_k).masked_fill(slots_NK < 0, 0.0)
        x_NH = torch.randn(N, shape[0]).to(dtype)
        # A row that no slot wants may hold anything, and nothing of it may come through.
        x_NH[(slots_NK < 0).all(1)] = float("nan")
        received = Rows(x_NH, slots_NK, weights_NK)
        y = layer.experts(received)
        expected = dense(received, weights, per_expert)
    assert y.dtype == dtype and y.shape == expected.shape
    if per_expert:
        y = y.masked_fill((slots_NK < 0).unsqueeze(-1), 0.0)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    scale = 1 + expected.abs().max().item() if N else 1
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=tolerance * scale)
    counts = torch.bincount(slots_NK[slots_NK >= 0], minlength=slots)
    assert layer.experts._rows_S.tolist() == counts.tolist()


def test_the_grouped_product_is_taken_where_it_can_be():
    assert isinstance(build(2, 16, 8, 1, False)[0].experts.product, GroupedProduct)
    assert isinstance(build(2, 33, 8, 1, False)[0].experts.product, SlotBySlot)
    assert isinstance(build(2, 16, 8, 1, True)[0].experts.product, SlotBySlot)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"MoE layer 0: gate_up is \(2, 6, 8\), not \(2, 8, 8\)"):
        placement = Placement(0, np.arange(2)[None], 2, 1)
        context = MoEContext(
            0, placement, LocalTransport(False), Recorder(), choose_products(False).matmul,
            False, CPU, torch.float32,
        )  # fmt: skip
        weights = MoEWeights(torch.zeros(2, 8), None, torch.zeros(2, 6, 8), torch.zeros(2, 8, 4))
        build_moe_layer(MoESpec(2, 1, 4), 0, weights, None, context)
