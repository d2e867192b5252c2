"""A step's parts against hand arithmetic, and what its overlaps may do."""

import random
import re
from dataclasses import replace

import pytest

from crossdock.core import ConfigError, ModelSpec
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.cost import StepModel, step_cost
from crossdock.planner.describe import load_model
from crossdock.planner.hardware import Hardware, Link
from crossdock.planner.layout import Layout

FP8 = "float8_e4m3fn"
PLAIN = replace(
    DEFAULT,
    roofline_power=200.0,  # the larger of the two
    sustained_share=1.0,
    attention_efficiency=1.0,
    expert_tile=0,
    layer_overhead_s=0.0,
    elementwise_passes=0.0,
    step_overhead_s=0.0,
)


@pytest.fixture(scope="module")
def v3() -> ModelSpec:
    return load_model("deepseek-v3")


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    return load_model("qwen3-30b-a3b")


def gpu(outer: bool = True, **flops: float) -> Hardware:
    return Hardware(
        "test",
        80 << 30,
        3e12,
        flops or {"bfloat16": 770e12, FP8: 1350e12},
        8,
        Link("inner", 376e9, 3e-6),
        Link("outer", 45e9, 4e-6) if outer else None,
    )


def decode(gpus: int = 72, **changes: object) -> Layout:
    layout = Layout("decode", gpus, mode="low_latency", weights_dtype=FP8)
    return replace(layout, **changes)  # type: ignore[arg-type]


def test_few_tokens_take_the_reading_of_weights(v3: ModelSpec) -> None:
    parts = StepModel(v3, gpu(), decode(32), "decode", PLAIN).parts(64, 0.0, 1.0)
    h = v3.hidden_size
    assert parts["attention_projections"] == pytest.approx(
        61 * v3.attention.params(h) / 3e12, rel=0.02
    )
    # 32 GPUs hold 8 slots each, and 2,048 tokens leave none idle.
    assert parts["experts"] == pytest.approx(58 * 8 * v3.expert_params / 3e12, rel=0.05)
    assert parts["dense"] == pytest.approx(3 * 3 * h * v3.intermediate_size / 3e12, rel=0.02)
    assert parts["lm_head"] == pytest.approx(v3.vocab_size * h * 2 / 3e12, rel=0.02)


def test_many_tokens_take_arithmetic(v3: ModelSpec) -> None:
    layout = Layout("prefill", 32, weights_dtype=FP8)
    parts = StepModel(v3, gpu(), layout, "prefill", PLAIN).parts(16384, 2048, 1.0)
    assert parts["experts"] == pytest.approx(
        58 * 16384 * 8 * 2 * v3.expert_params / 1350e12, rel=1e-3
    )
    # Prompts take the expanded form: 192 wide products of queries and keys, 128 of values.
    assert parts["attention_kv"] == pytest.approx(
        61 * 16384 * 2048 * 2 * 128 * (192 + 128) / 770e12, rel=1e-3
    )


def test_decode_attention_reads_the_cache_or_computes(v3: ModelSpec, qwen: ModelSpec) -> None:
    def seconds(spec: ModelSpec, dtype: str) -> float:
        layout = decode(8, weights_dtype=dtype)
        return StepModel(spec, gpu(), layout, "decode", PLAIN).parts(64, 4096, 1.0)["attention_kv"]

    assert seconds(qwen, "bfloat16") == pytest.approx(
        64 * 4096 * qwen.kv_bytes_per_token() / 3e12, rel=1e-3
    )
    reading = 64 * 4096 * v3.kv_bytes_per_token() / 3e12
    computing = 61 * 64 * v3.attention.flops(4096) / 770e12
    assert seconds(v3, FP8) == pytest.approx(max(reading, computing), rel=0.02)


def test_a_sliding_window_ends_the_reading(qwen: ModelSpec) -> None:
    windowed = replace(qwen, attention=replace(qwen.attention, sliding_window=1024))
    layout = decode(8, weights_dtype="bfloat16")
    kv = [
        StepModel(spec, gpu(), layout, "decode").parts(8, context, 1.0)["attention_kv"]
        for spec, context in ((windowed, 9000), (windowed, 1024), (qwen, 1024), (qwen, 9000))
    ]
    assert kv[0] == kv[1] == kv[2] < kv[3]


def test_mla_under_tensor_parallelism(v3: ModelSpec) -> None:
    one = StepModel(v3, gpu(), decode(64), "decode", PLAIN)
    eight = StepModel(v3, gpu(), decode(64, tp=8), "decode", PLAIN)
    # The latent is read by every rank of a group, and 16 heads fill a quarter of a tile of 64.
    assert eight.kv_read_s == pytest.approx(8 * one.kv_read_s)
    assert eight.kv_flop_s == pytest.approx(4 * one.kv_flop_s)
    assert eight.parts(8, 0.0, 1.0)["all_reduce"] > 0 == one.parts(8, 0.0, 1.0)["all_reduce"]


def test_idle_slots_are_not_read(v3: ModelSpec) -> None:
    model = StepModel(v3, gpu(), decode(8), "decode", PLAIN)
    rng = random.Random(1)
    for tokens in (1, 4, 32):
        rows, _, active = model.expert_rows(tokens, 1.0)
        used = [
            len({e for _ in range(8 * tokens) for e in rng.sample(range(256), 8) if e < 32}) / 32
            for _ in range(200)
        ]
        assert rows == tokens * 8
        assert active == pytest.approx(sum(used) / len(used), rel=0.05)


def test_tiles_are_padded(v3: ModelSpec) -> None:
    model = StepModel(v3, gpu(), decode(32), "decode")
    _, padded, _ = model.expert_rows(4, 1.0)  # 4 rows in each of 8 slots
    assert padded == pytest.approx(8 * 64, rel=0.03)
    _, padded, _ = model.expert_rows(4096, 1.0)
    assert padded == pytest.approx(8 * (4096 + 32))


def test_imbalance_is_the_busiest_rank(v3: ModelSpec) -> None:
    layout = Layout("prefill", 32, weights_dtype=FP8)
    model = StepModel(v3, gpu(), layout, "prefill", PLAIN)
    even, skewed = model.parts(8192, 1024, 1.0), model.parts(8192, 1024, 1.5)
    assert skewed["experts"] == pytest.approx(1.5 * even["experts"], rel=1e-3)
    assert skewed["dispatch"] > even["dispatch"]
    assert skewed["attention_kv"] == even["attention_kv"]


def test_sharded_experts_compute_the_same_and_all_reduce(v3: ModelSpec) -> None:
    ep = Layout("prefill", 8, weights_dtype=FP8)
    tp = replace(ep, tp=8, experts="tp")
    # Every rank handles all rows of its group, which at 3 TB/s would be the bound.
    hardware = replace(gpu(), memory_bytes_per_s=30e12)
    a = StepModel(v3, hardware, ep, "prefill", PLAIN).parts(8192, 1024, 1.0)
    b = StepModel(v3, hardware, tp, "prefill", PLAIN).parts(8192, 1024, 1.0)
    assert b["experts"] == pytest.approx(a["experts"], rel=1e-3)
    assert b["dispatch"] == b["combine"] == 0.0
    ring = 2 * 7 / 8 * 8192 * 8 * 2 * 7168 / 376e9
    assert b["all_reduce"] == pytest.approx(61 * 2 * ring, rel=0.02)


def test_one_gpu_exchanges_nothing(qwen: ModelSpec) -> None:
    cost = step_cost(
        qwen, gpu(outer=False), Layout("both", 1), "decode", tokens_per_gpu=32, context=1024
    )
    assert cost.communication == cost.exposed_communication == cost.hidden == 0.0


@pytest.mark.parametrize("overlap", ["off", "sbo", "tbo"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_overlap_hides_no_more_than_there_is(v3: ModelSpec, overlap: str, phase: str) -> None:
    rng = random.Random(f"{overlap}{phase}")
    for _ in range(40):
        layout = Layout(
            phase,  # type: ignore[arg-type]
            rng.choice([2, 8, 16, 32, 72]),
            mode=rng.choice(["normal", "low_latency"]),
            overlap=overlap,  # type: ignore[arg-type]
            weights_dtype=FP8,
        )
        model = StepModel(v3, gpu(), layout, phase)  # type: ignore[arg-type]
        cost = model.cost(rng.uniform(1, 9000), rng.uniform(0, 5000), rng.uniform(1, 2))
        assert 0.0 <= cost.hidden <= cost.communication
        assert cost.total == pytest.approx(sum(cost.parts.values()) - cost.hidden)
        assert cost.exposed_communication >= 0.0
        assert model.seconds(cost.tokens, cost.context, cost.imbalance) == cost.total
        if overlap == "off":
            assert cost.hidden == 0.0


def test_two_batches_cost_at_small_batch_and_gain_at_large(v3: ModelSpec) -> None:
    def gain(tokens: float) -> float:
        off, tbo = (
            StepModel(v3, gpu(), decode(overlap=overlap), "decode").seconds(tokens, 2050)
            for overlap in ("off", "tbo")
        )
        return off / tbo

    assert gain(32) < 0.85 < 1.2 < gain(256)
    gains = [gain(t) for t in (16, 32, 64, 128, 256)]
    assert gains == sorted(gains)


def test_stores_over_nvlink_leave_nothing_to_hide(v3: ModelSpec) -> None:
    cost = StepModel(v3, gpu(), decode(8, overlap="tbo"), "decode").cost(128, 2050)
    assert cost.hidden == 0.0


def test_single_batch_overlap_hides_at_most_the_shared_expert_and_a_third(v3: ModelSpec) -> None:
    cost = StepModel(v3, gpu(), decode(overlap="sbo"), "decode").cost(128, 2050)
    shared, down = cost.parts["shared_expert"], cost.parts["experts"] / 3
    assert 0.0 < cost.hidden <= shared + down


def test_more_tokens_never_take_less(v3: ModelSpec) -> None:
    model = StepModel(v3, gpu(), decode(overlap="tbo"), "decode")
    seconds = [model.seconds(t, 2050) for t in (0, 1, 2, 8, 32, 128, 129, 512, 1024)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("overlap", ["off", "tbo"])
def test_explanation_adds_up(v3: ModelSpec, overlap: str) -> None:
    layout = decode(overlap=overlap)
    cost = step_cost(v3, gpu(), layout, "decode", tokens_per_gpu=200, context=3000, imbalance=1.2)
    halves = 2 if overlap == "tbo" else 1
    shown = {}
    for line in cost.explain[1:-1]:
        name, rest = line.split(" = ", 1)
        found = re.search(r"= ([\d.,]+) ms", rest)
        shown[name] = float(found[1].replace(",", "")) / 1e3 if found else 0.0
    assert shown.keys() | {"step"} == cost.parts.keys()
    for name, seconds in shown.items():
        assert halves * seconds == pytest.approx(cost.parts[name], abs=2e-6)
    assert f"{cost.total * 1e3:,.3f} ms" in cost.explain[-1]


def test_fp4_experts_fall_back_to_what_the_gpu_multiplies(v3: ModelSpec) -> None:
    layout = Layout("prefill", 8, weights_dtype="nvfp4")
    slow = StepModel(v3, gpu(), layout, "prefill", PLAIN).parts(16384, 0.0, 1.0)["experts"]
    native = gpu(bfloat16=770e12, float8_e4m3fn=1350e12, nvfp4=2700e12)
    fast = StepModel(v3, native, layout, "prefill", PLAIN).parts(16384, 0.0, 1.0)["experts"]
    assert slow == pytest.approx(2 * fast, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "hardware", "words"),
    [
        (decode(72, tp=16), gpu(), "tp 16 does not divide 72"),
        (decode(16), gpu(outer=False), "no network"),
        (decode(8, kv_dtype="int4"), gpu(), "'int4' is unknown"),
        (decode(8, weights_dtype="float32"), gpu(), "no rate of products for float32"),
    ],
)
def test_refusals(v3: ModelSpec, layout: Layout, hardware: Hardware, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StepModel(v3, hardware, layout, "decode")


def test_calibration_is_given_in(v3: ModelSpec) -> None:
    slow = Calibration(step_overhead_s=1.0)
    assert StepModel(v3, gpu(), decode(), "decode", slow).seconds(8, 100) > 1.0
