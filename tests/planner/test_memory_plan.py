import random
from dataclasses import replace

import pytest
import torch

from crossdock.balance import linear_placement
from crossdock.cache import page_bytes
from crossdock.comm import LocalTransport
from crossdock.comm.nvlink.layout import NvlinkLayout, nvlink_bytes
from crossdock.comm.slot_copies import stride_of
from crossdock.core import EngineConfig, shard_attention
from crossdock.core.staging import Staging
from crossdock.layers import SoloGroup
from crossdock.metrics import Recorder
from crossdock.models import ModelContext, build_model
from crossdock.models.dummy import DummyWeights
from crossdock.models.fp8 import widen
from crossdock.planner.commands import redundant_experts
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import load_hardware
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.memory import (
    expert_bytes,
    kv_bytes_per_token,
    plan_memory,
    rank_weights,
    slots_per_rank,
    smallest_ep,
    transport_bytes,
)
from crossdock.planner.search_pricing import CostPricing

FP8 = "float8_e4m3fn"
V3 = load_model("deepseek-v3")
H100, H200 = load_hardware("h100"), load_hardware("h200")
WORK = Workload(isl=2000, osl=100)


def v3(role="decode", gpus=72, tokens=256, **more):
    return Layout(role, gpus, weights_dtype=FP8, max_tokens_per_rank=tokens, **more)


def test_kv_per_token():
    assert kv_bytes_per_token(V3, "bfloat16") == 70_272 == 61 * (512 + 64) * 2
    assert kv_bytes_per_token(V3, FP8) == 35_136
    assert kv_bytes_per_token(V3, "bfloat16", tp=8) == 70_272  # the latent is whole on each
    qwen = load_model("qwen3-235b-a22b")
    whole = kv_bytes_per_token(qwen, "bfloat16")
    assert whole == qwen.kv_bytes_per_token() == 192_512
    assert kv_bytes_per_token(qwen, "bfloat16", tp=4) == whole // 4
    assert kv_bytes_per_token(qwen, "bfloat16", tp=8) == whole // 4  # 4 KV heads


def test_one_redundant_expert_per_rank():
    assert expert_bytes(V3, FP8) / 2**30 == pytest.approx(2.38, abs=0.005)
    with_one = plan_memory(V3, H100, v3(redundant_per_rank=1), WORK)
    without = plan_memory(V3, H100, v3(), WORK)
    # One more to hold, and a place where one of a layer arrives.
    more = with_one.used_bytes - without.used_bytes
    assert more == expert_bytes(V3, FP8) * 59 // 58
    # Scales and all.
    assert expert_bytes(V3, FP8) == 58 * (44_040_192 + 44_040_192 // 128**2 * 4)


def test_the_smallest_ep_on_80_gb_gpus():
    found = smallest_ep(V3, H100, v3("both", 8, 2048), WORK)
    assert 12 < found.quotient < 13.5 and found.ranks == 13 and found.even == 16
    shown = "\n".join(found.lines)
    assert "653.9e9 parameters = 654.1 GB" in shown
    # The printed sum is the sum.
    plan = plan_memory(V3, H100, v3("both", 13, 2048), WORK)
    left = plan.budget_bytes - (plan.used_bytes - plan.weights.experts) - 2100 * 70_272
    assert f"= {left / 1e9:.2f} GB" in shown
    assert found.quotient == pytest.approx(256 * expert_bytes(V3, FP8) / left)
    # It is the smallest, and really fits.
    assert plan.fits
    assert not any(plan_memory(V3, H100, v3("both", n, 2048), WORK).fits for n in range(1, 13))
    # BF16 needs twice the memory and more than twice the GPUs.
    bf16 = smallest_ep(V3, H100, replace(v3("both", 8, 2048), weights_dtype="bfloat16"), WORK)
    assert bf16.ranks > 2 * found.ranks


def test_eight_h100_are_refused_with_numbers():
    plan = plan_memory(V3, H100, v3("both", 8, 2048), WORK)
    assert not plan.fits and plan.requests == 0
    needed = plan.used_bytes / 1e9
    assert f"{needed:.1f} GB are needed" in plan.short
    assert f"short by {plan.short_bytes / 1e9:.1f} GB" in plan.short
    assert "experts, 81.8 GB" in plan.short
    assert plan.short in plan.lines()


def test_the_sum_is_of_all_parts():
    plan = plan_memory(V3, H100, v3("decode", 72, 256, redundant_per_rank=1), WORK)
    parts = plan.parts()
    assert set(parts) == {
        "attention", "dense", "shared", "experts", "embeddings",
        "transport", "staging", "activations", "workspaces", "graphs",
    }  # fmt: skip
    assert all(size > 0 for size in parts.values())
    assert sum(parts.values()) == plan.used_bytes
    assert plan.kv_tokens == (plan.budget_bytes - plan.used_bytes) // 70_272
    assert plan.requests == plan.kv_tokens // 2100
    assert plan.fits and not plan.short and plan.short_bytes == 0
    assert parts["experts"] == (4 + 1) * expert_bytes(V3, FP8)


def test_kv_may_be_what_is_short():
    roomy = plan_memory(V3, H100, v3("decode", 72, 8), WORK)
    long = Workload(isl=roomy.kv_tokens, osl=1)
    plan = plan_memory(V3, H100, v3("decode", 72, 8), long)
    assert not plan.fits and plan.short_bytes == 0
    assert plan.short.startswith("KV cache") and "short by 1 tokens" in plan.short


def test_prefill_holds_prompts_alone():
    decode = plan_memory(V3, H100, v3("decode", 32, 64), WORK)
    prefill = plan_memory(V3, H100, v3("prefill", 32, 64), WORK)
    assert (prefill.length, decode.length) == (2000, 2100)
    assert prefill.graphs == 0 < decode.graphs


def test_slots_of_many_ranks():
    assert slots_per_rank(V3, v3(gpus=256)) == 1
    assert slots_per_rank(V3, v3(gpus=320)) == 1  # more ranks than experts
    assert slots_per_rank(V3, v3(gpus=13)) == 20
    assert slots_per_rank(V3, v3(gpus=32, redundant_per_rank=1)) == 9


def test_tp_shards_what_it_can():
    whole, shard = (rank_weights(V3, v3(gpus=16, tp=tp)) for tp in (1, 8))
    # MLA's down-projections stay whole: 7168 x (1536 + 576) of each layer.
    down = 61 * 7168 * (1536 + 576)
    assert shard.attention > down
    assert shard.attention - down == pytest.approx((whole.attention - down) / 8, rel=0.01)
    assert shard.embeddings * 8 == whole.embeddings
    assert (shard.experts, shard.shared) == (whole.experts, whole.shared)
    by_tp = rank_weights(V3, v3(gpus=16, tp=16, experts="tp"))
    assert by_tp.experts == pytest.approx(whole.experts, rel=1e-6)  # EP16 and TP16 share alike
    assert by_tp.dense < whole.dense / 15
    ranks = [rank_weights(load_model("qwen3-30b-a3b"), Layout("both", 8, tp=t)) for t in (4, 8)]
    assert ranks[1].attention > ranks[0].attention / 2  # KV heads are held twice


class Shapes(DummyWeights):
    """Tensors without memory."""

    def __init__(self):
        super().__init__(torch.bfloat16, torch.device("meta"), 0)

    def get(self, name, shape, fp32=False):
        return torch.empty(
            shape, dtype=torch.float32 if fp32 else torch.bfloat16, device=self._device
        )

    def get_fp8(self, name, shape, index=None, order=None):
        codes = torch.empty(shape, dtype=torch.uint8, device=self._device).view(torch.float8_e4m3fn)
        return widen(codes, torch.empty([-(-n // 128) for n in shape], device=self._device))


def engine_holds(spec, layout):
    """The model of the first rank."""
    fp8, group, transport = layout.weights_dtype == FP8, SoloGroup(), LocalTransport(False)
    group.size, transport.on_device = layout.tp, fp8
    context = ModelContext(
        rank=0,
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        invariant=False,
        placement=linear_placement(
            len(spec.moe_layers), spec.moe.num_experts, layout.gpus, redundant_experts(layout, spec)
        ),
        transport=transport,
        recorder=Recorder(),
        max_model_len=16,
        fp8=fp8,
        group=group,
    )
    return build_model(spec, Shapes(), context)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-30b-a3b", Layout("both", 8, tp=4)),
        ("qwen3-30b-a3b", Layout("both", 8, tp=4, weights_dtype=FP8, kv_dtype=FP8)),
        ("qwen3-235b-a22b", Layout("both", 8, tp=4, redundant_per_rank=1, weights_dtype=FP8)),
        ("mixtral-8x7b", Layout("both", 8, tp=2, weights_dtype=FP8)),
        ("deepseek-v2-lite", Layout("both", 4, tp=2)),
        ("deepseek-v2-lite", Layout("both", 1)),
        ("deepseek-v3", Layout("both", 8, weights_dtype=FP8, kv_dtype=FP8)),
    ],
)
def test_what_our_engine_holds(name, layout):
    spec = load_model(name)
    model, plan = engine_holds(spec, layout), CostPricing(spec, H200, WORK).memory(layout)
    assert plan.weights.total == pytest.approx(model.weight_bytes, rel=0.03)
    tables = {id(t): t.nbytes for t in (model.embedding_VH, model.head_VH)}
    assert plan.weights.embeddings == sum(tables.values())
    one = sum(tensor[0].nbytes for tensor in model.moe_layers[0].slot_tensors())
    places = slots_per_rank(spec, layout) if layout.gpus > 1 else 0
    assert plan.staging == pytest.approx(places * stride_of(one), rel=1e-4)
    heads = shard_attention(spec.attention, layout.tp)
    kv_dtype = getattr(torch, layout.kv_dtype)
    one_page = page_bytes(heads, spec.num_layers, 16, kv_dtype)
    assert 16 * plan.kv_bytes_per_token == pytest.approx(one_page, rel=0.04)


def test_other_engines_split_the_vocabulary():
    priced = CostPricing(V3, H100, WORK)
    whole = rank_weights(V3, v3(gpus=8)).embeddings
    for layout in (v3(gpus=16, tp=2), v3(gpus=8, tp=8)):  # two nodes; eight ranks a group
        assert priced.memory(layout).weights.embeddings * layout.tp == whole


def test_transport_is_what_the_transport_takes():
    rng = random.Random()
    for _ in range(20):
        ranks, tokens = rng.randrange(2, 64), rng.randrange(1, 20_000)
        layout = v3("both", ranks, tokens)
        at_once = min(tokens, EngineConfig.max_dispatch_tokens)  # more travel in pieces
        expected = nvlink_bytes(ranks, at_once, 7168, 8, fp8=True)
        if tokens > 256:
            expected += nvlink_bytes(ranks, 256, 7168, 8, fp8=True)
        assert transport_bytes(V3, layout) == expected
        args = (ranks, tokens, 7168, 8, 2, True)
        assert Staging(*args).nbytes == NvlinkLayout(*args).nbytes
    assert transport_bytes(V3, v3("both", 1)) == 0
    assert transport_bytes(V3, v3("both", 16, tp=16, experts="tp")) == 0
    assert transport_bytes(V3, v3("both", 320)) > 0  # beyond what the kernels serve today


def test_larger_steps_take_more():
    sizes = [plan_memory(V3, H100, v3("prefill", 32, t), WORK) for t in (1024, 4096, 16384)]
    assert sizes[0].activations < sizes[1].activations < sizes[2].activations
    assert sizes[0].transport < sizes[1].transport < sizes[2].transport


def test_nothing_fits_on_a_small_gpu():
    small = replace(H100, memory_bytes=16 << 30)
    found = smallest_ep(V3, small, v3("both", 8, 256), WORK)
    assert found.ranks is None and found.even is None and found.quotient == float("inf")
    assert "short by" in found.lines[-1]


def test_redundant_experts_are_in_the_smallest_ep():
    plain = smallest_ep(V3, H100, v3("decode", 8, 64), WORK)
    more = smallest_ep(V3, H100, v3("decode", 8, 64, redundant_per_rank=4), WORK)
    assert more.quotient > plain.quotient and more.ranks > plain.ranks
    assert "redundant experts" in "\n".join(more.lines)
