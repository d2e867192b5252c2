import json

import pytest

from crossdock.core import CheckpointError, ConfigError, MLASpec, UserError, load_spec, recipes
from crossdock.core.recipes import find_recipe, recipe_names
from crossdock.planner.describe import load_model
from crossdock.planner.facts import model_facts, native_dtype

DIMENSIONS = """
num_hidden_layers = 4
hidden_size = 256
intermediate_size = 512
vocab_size = 1000
max_position_embeddings = 4096
num_attention_heads = 8
num_key_value_heads = 2
head_dim = 32
n_routed_experts = 16
num_experts_per_tok = 4
moe_intermediate_size = 128
n_shared_experts = 2
first_k_dense_replace = 1
"""


def test_every_shipped_model_loads():
    assert {
        "deepseek-v2-lite", "deepseek-v3", "deepseek-r1", "kimi-k2", "qwen3-30b-a3b",
        "qwen3-235b-a22b", "mixtral-8x7b", "glm-4.5",
    } <= set(recipe_names("models"))  # fmt: skip
    for name in recipe_names("models"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "total", "active", "kv"),
    [  # as the models' own reports round them; parameters in units of 1e9
        ("deepseek-v3", 671, 37, 70_272),
        ("deepseek-v2-lite", 15.7, 2.4, 31_104),
        ("kimi-k2", 1_026, 32, 70_272),
        ("qwen3-30b-a3b", 30.5, 3.3, 98_304),
        ("qwen3-235b-a22b", 235, 22, 192_512),
        ("mixtral-8x7b", 46.7, 12.9, 131_072),
        ("glm-4.5", 355, 32, 376_832),
    ],
)
def test_sizes_are_the_published_ones(name, total, active, kv):
    facts = model_facts(load_model(name), context=4096)
    assert facts.total_params / 1e9 == pytest.approx(total, rel=0.01)
    assert facts.active_params / 1e9 == pytest.approx(active, rel=0.12)  # embeddings are counted
    assert facts.kv_bytes_per_token == kv


def test_facts_of_deepseek_v3():
    spec = load_model("deepseek-v3")
    facts = model_facts(spec, context=4096)
    assert facts.routed_params / 1e9 == pytest.approx(653.9, abs=0.05)
    bf16 = model_facts(spec, context=4096, dtype="bfloat16")
    assert bf16.weights.experts / 1e9 == pytest.approx(1308, abs=0.5)
    assert facts.weights.experts / 1e9 == pytest.approx(654, abs=0.5)
    # 18 times a dense model's memory for its FLOPs.
    assert bf16.weights.total / bf16.dense_bytes == pytest.approx(
        spec.num_params / spec.active_params, rel=1e-4
    )
    assert facts.flops_per_token == spec.flops_per_token(4096)
    shown = "\n".join(facts.lines())
    assert "671.0e9" in shown and "70,272 bytes" in shown and "142.8e9" in shown
    assert "one redundant expert per rank: 2.38 GiB" in shown


def test_weight_parts_add_up_to_the_model():
    for name in recipe_names("models"):
        spec = load_model(name)
        parts = model_facts(spec, 1, dtype="bfloat16").weights
        assert parts.total == 2 * spec.num_params, name


def test_a_directory_and_a_config_give_the_same_spec(tmp_path):
    source = find_recipe("models", "Qwen3-30B-A3B")
    (tmp_path / "config.json").write_text(source.read_text())
    assert load_model(tmp_path) == load_model(tmp_path / "config.json") == load_spec(tmp_path)
    assert load_model(tmp_path) == load_model("qwen3-30b-a3b")


def test_dimensions_of_another_model(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(DIMENSIONS)
    spec = load_model(path)
    assert spec.moe_layers == (1, 2, 3) and spec.moe.shared_intermediate_size == 256
    attention = 256 * 32 * (2 * 8 + 2 * 2)
    moe = 3 * 256 * 128 * (16 + 2) + 256 * 16
    assert spec.num_params == 4 * attention + 3 * moe + 3 * 256 * 512 + 2 * 1000 * 256
    assert native_dtype(spec) == "bfloat16"
    mla = DIMENSIONS.replace("num_key_value_heads = 2\nhead_dim = 32", "").strip() + (
        "\nkv_lora_rank = 64\nqk_nope_head_dim = 32\nqk_rope_head_dim = 16\nv_head_dim = 32\n"
        "weight_block_size = [128, 128]\n"
    )
    path.write_text(mla)
    spec = load_model(path)
    assert isinstance(spec.attention, MLASpec) and spec.attention.kv_width == 80
    assert native_dtype(spec) == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden_size = 256", "", "missing: hidden_size"),
        ("hidden_size = 256", "hidden_size = 0", "hidden_size = 0"),
        ("hidden_size = 256", 'hidden_size = "256"', "expected int"),
        ("hidden_size = 256", "hidden_size = true", "expected int"),
        ("hidden_size = 256", "hidden_size = 256\nwidth = 3", "unknown key width"),
        ("intermediate_size = 512", "", "missing: intermediate_size"),
        ("num_experts_per_tok = 4", "num_experts_per_tok = 17", "17 of 16 experts"),
        ("first_k_dense_replace = 1", "first_k_dense_replace = 4", "no experts"),
        ("hidden_size = 256", 'hidden_size = 256\ndtype = "int3"', "int3"),
        ("hidden_size = 256", "hidden_size = 256\nweight_block_size = [1]", "two whole"),
        ("hidden_size = 256", "hidden_size = 256\nweight_block_size = [0, 0]", "two whole numbers"),
        ("hidden_size = 256", "hidden_size = 256\nweight_block_size = [128, -1]", "two whole"),
        ("hidden_size = 256", "hidden_size = 256\nn_group = 3", "n_group 3 of 16 experts"),
        ("hidden_size = 256", "hidden_size = 256\nn_group = 32", "n_group 32 of 16 experts"),
        ("hidden_size = 256", "hidden_size = 256\nn_group = 4\ntopk_group = 5", "topk_group 5"),
        ("num_key_value_heads = 2", "num_key_value_heads = 3", "multiple of num_key_value_heads 3"),
        ("head_dim = 32", "head_dim = 33", "head_dim 33; expected an even number"),
        ("hidden_size = 256", "hidden_size = ", "not valid TOML"),
    ],
)
def test_wrong_dimensions_are_named(tmp_path, old, new, words):
    path = tmp_path / "wrong.toml"
    text = DIMENSIONS.replace(f"\n{old}\n", f"\n{new}\n", 1)
    assert text != DIMENSIONS
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        load_model(path)
    assert "wrong.toml" in str(error.value)


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="a model directory holds a config"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="deepseek-v3"):
        load_model("deepseek-v33")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_model(tmp_path / "a.json")
    (tmp_path / "a.yaml").write_text("x")
    with pytest.raises(ConfigError, match=r"\.toml of dimensions"):
        load_model(tmp_path / "a.yaml")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="nobody/no-such-model"):
        load_model("nobody/no-such-model")


def test_an_architecture_that_only_plans_is_refused_by_the_engine(tmp_path):
    config = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 92}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"Glm4MoeForCausalLM.*not supported"):
        load_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"not supported.*\.toml of its dimensions"):
        load_model(tmp_path)
    assert load_model("glm-4.5").architecture == "Glm4MoeForCausalLM"


def test_recipes_that_are_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.setattr(recipes.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="no shipped recipes"):
        recipes.recipes_dir()
    (tmp_path / "share" / "crossdock" / "recipes" / "hardware").mkdir(parents=True)
    assert recipes.recipes_dir() == tmp_path / "share" / "crossdock" / "recipes"
