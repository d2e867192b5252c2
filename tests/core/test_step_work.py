"""What a step needs, against sums token by token."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.core import MLASpec, Plan, Request, SamplingParams, Scheduled, load_spec
from crossdock.core.ceilings import ceilings_of, hardware_of, shipped_ceilings
from crossdock.core.errors import ConfigError
from crossdock.core.step_work import RankWork

MODELS = Path(__file__).parents[2] / "recipes" / "models"


def item(start, tokens, sample=True):
    request = Request("r", (1,), SamplingParams(), key=0)
    return Scheduled(request, start, tuple(range(tokens)), (), sample)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_decode_takes_what_a_token_takes(name):
    spec = load_spec(MODELS / f"{name}.json")
    work = RankWork(spec, 0, 0, 0.0)
    contexts = [random.randrange(1, 4000) for _ in range(5)]
    plan = Plan(tuple(item(c - 1, 1) for c in contexts))
    want = sum(spec.flops_per_token(c) for c in contexts)
    assert work.flops(plan) == want
    assert replace(work, tp=2).flops(plan) == want // 2
    head = 2 * spec.vocab_size * spec.hidden_size
    unsampled = Plan(tuple(i._replace(sample=False) for i in plan.items))
    assert work.flops(unsampled) == want - len(contexts) * head


def test_a_prompt_sees_what_is_before_each_of_its_tokens():
    spec = load_spec(MODELS / "deepseek-v2-lite.json")
    mla = spec.attention
    assert isinstance(mla, MLASpec)
    start, tokens = 37, 21
    pairs = sum(start + n + 1 for n in range(tokens))
    each = 2 * mla.num_heads * (128 + 64 + 128)  # keys of 128 + 64, values of 128, as expanded
    matrices = spec.flops_per_token(0) - 2 * spec.vocab_size * spec.hidden_size
    got = RankWork(spec, 0, 0, 0.0).flops(Plan((item(start, tokens, sample=False),)))
    assert got == tokens * matrices + spec.num_layers * pairs * each
    # The same prompt in two steps takes the same.
    halves = [Plan((item(start, 9, False),)), Plan((item(start + 9, 12, False),))]
    assert sum(RankWork(spec, 0, 0, 0.0).flops(half) for half in halves) == got


def test_a_window_bounds_what_a_token_sees():
    spec = load_spec(MODELS / "qwen3-30b-a3b.json")
    spec = replace(spec, attention=replace(spec.attention, sliding_window=16))
    start, tokens = 5, 40
    pairs = sum(min(16, start + n + 1) for n in range(tokens))
    work = RankWork(spec, 0, 0, 1.0)
    none = replace(spec, num_layers=0, moe_layers=())
    bare = RankWork(none, 0, 0, 1.0).flops(Plan((item(start, tokens),)))
    layers = 2 * (spec.params_with(spec.moe.top_k) - none.params_with(spec.moe.top_k)) * tokens
    got = work.flops(Plan((item(start, tokens),)))
    assert got - bare - layers == spec.num_layers * spec.attention.flops(1) * pairs
    assert work.bytes(Plan((item(1000, 1),)), 0) == 17


def test_bytes_are_weights_once_and_the_cache_of_each_sequence():
    work = RankWork(load_spec(MODELS / "qwen3-30b-a3b.json"), 1000, 10, 0.5)
    assert work.bytes(Plan((item(99, 1), item(0, 60))), 7) == 1000 + 70 + 80
    assert work.bytes(Plan(), 7) == 70  # an idle rank reads experts alone


def test_ceilings_are_those_of_the_recipe_or_a_measured_file(tmp_path):
    kind = hardware_of("NVIDIA H200")
    assert kind == "h200"
    found = ceilings_of(kind, "bfloat16")
    assert (found.flops_per_s, found.bytes_per_s) == (770e12, pytest.approx(4800e9 * 0.9))
    assert found.source == "h200.toml"
    measured = tmp_path / "mine.toml"
    measured.write_text("memory_gbytes_per_s = 12.5\n[matmul_tflop_per_s]\nfloat32 = 0.125\n")
    mine = ceilings_of(str(measured), "float32")
    assert (mine.flops_per_s, mine.bytes_per_s) == (0.125e12, 12.5e9)
    with pytest.raises(ConfigError, match="bfloat16"):
        ceilings_of(str(measured), "bfloat16")
    with pytest.raises(ConfigError, match="h200"):
        ceilings_of("h2000", "bfloat16")


@pytest.mark.parametrize(
    ("memory", "rate"),
    [
        ("12.5", "0"), ("12.5", "nan"), ("12.5", "inf"), ("12.5", "-1.0"), ("12.5", '"fast"'),
        ("12.5", "true"), ("0.0", "1.0"), ("nan", "1.0"), ('"fast"', "1.0"), ("[1]", "1.0"),
    ],
)  # fmt: skip
def test_ceilings_that_nothing_can_be_a_share_of_are_refused(tmp_path, memory, rate):
    path = tmp_path / "mine.toml"
    path.write_text(f"memory_gbytes_per_s = {memory}\n[matmul_tflop_per_s]\nbfloat16 = {rate}\n")
    with pytest.raises(ConfigError, match=r"mine\.toml.* = .*; expected a finite number above 0"):
        ceilings_of(str(path), "bfloat16")


def test_ceilings_of_a_file_in_another_form(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("memory_gbytes_per_s = 1.0\nmatmul_tflop_per_s = 3.0\n")
    with pytest.raises(ConfigError, match="expected a table by dtype"):
        ceilings_of(str(path), "bfloat16")
    path.write_text(
        "memory_gbytes_per_s = 1.0\nmemory_achievable_share = 2\n[matmul_tflop_per_s]\n"
        "bfloat16 = 3.0\n"
    )
    with pytest.raises(ConfigError, match="share of at most 1"):
        ceilings_of(str(path), "bfloat16")


def test_a_dtype_that_a_gpus_description_lacks_is_refused_only_where_it_was_asked_for():
    assert shipped_ceilings("NVIDIA H200", "bfloat16") == ceilings_of("h200", "bfloat16")
    assert shipped_ceilings("NVIDIA H200", "float32") is None
    assert shipped_ceilings("NVIDIA GeForce RTX 4090", "bfloat16") is None
    with pytest.raises(ConfigError, match="float32"):
        ceilings_of("h200", "float32")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_known_by_its_name_unless_a_slower_one_shares_it(name, kind):
    assert hardware_of(name) == kind
