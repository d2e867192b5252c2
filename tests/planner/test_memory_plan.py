import random
from dataclasses import replace

import pytest

from crossdock.comm.nvlink.layout import NvlinkLayout, nvlink_bytes
from crossdock.core.staging import Staging
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

FP8 = "float8_e4m3fn"
V3 = load_model("deepseek-v3")
H100 = load_hardware("h100")
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
    assert with_one.used_bytes - without.used_bytes == expert_bytes(V3, FP8)
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
        "transport", "activations", "workspaces", "graphs",
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


def test_transport_is_what_the_transport_takes():
    rng = random.Random()
    for _ in range(20):
        ranks, tokens = rng.randrange(2, 64), rng.randrange(1, 9000)
        layout = v3("both", ranks, tokens)
        expected = nvlink_bytes(ranks, tokens, 7168, 8, fp8=True)
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
