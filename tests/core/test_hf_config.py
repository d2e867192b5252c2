"""Configs as the published checkpoints have them, and the sizes their authors publish."""

import copy
import json
import math

import pytest
from transformers import AutoConfig

from crossdock.core import (
    CheckpointError,
    GQASpec,
    MLASpec,
    ModelSpec,
    QuantSpec,
    load_spec,
    parse_config,
)

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
YARN = V3["rope_scaling"]
KIMI_K2 = V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
YARN_BY_HAND = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CONFIGS = {
    "v3": V3,
    "kimi": KIMI_K2,
    "v2": V2,
    "v2_lite": V2_LITE,
    "qwen": QWEN3_30B,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("v3", 671e9, 37e9),
        ("kimi", 1.04e12, 32e9),
        ("v2", 236e9, 21e9),
        ("v2_lite", 15.7e9, 2.4e9),
        ("qwen", 30.5e9, 3.3e9),
        ("mixtral", 46.7e9, 12.9e9),
        ("olmoe", 6.92e9, 1.28e9),
    ],
)
def test_published_sizes(name, total, active):
    spec = parse_config(CONFIGS[name])
    # Kimi's 1.04T is a rounded figure: its tensors add up to 1.03T.
    assert spec.num_params == pytest.approx(total, rel=0.015 if name == "kimi" else 0.01)
    # Some authors count the input embedding as active, some do not.
    without_input = spec.active_params - spec.vocab_size * spec.hidden_size
    assert without_input <= 1.025 * active and spec.active_params >= 0.985 * active


def test_deepseek_v3_by_the_paper():
    spec = parse_config(V3)
    assert spec.kv_bytes_per_token("bfloat16") == 70_272
    routed = len(spec.moe_layers) * spec.moe.num_experts * spec.expert_params
    assert routed == pytest.approx(653.9e9, rel=1e-3)
    assert spec.quant == QuantSpec((128, 128))
    assert spec.attention == MLASpec(128, 1536, 512, 128, 64, 128)
    assert spec.moe_layers == tuple(range(3, 61))
    moe = spec.moe
    assert (moe.scoring, moe.correction_bias, moe.norm_topk_prob) == ("sigmoid", True, True)
    assert (moe.num_groups, moe.topk_groups, moe.group_score) == (8, 4, "top2")
    assert (moe.routed_scaling_factor, moe.shared_intermediate_size) == (2.5, 2048)
    rope = spec.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 40.0, 4096)
    assert (rope.mscale, rope.mscale_all_dim, rope.interleaved, rope.dim) == (1.0, 1.0, True, 64)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.dtype) == (0, (1,), "bfloat16")


def test_kimi_k2_is_a_deepseek_v3_with_or_without_architectures():
    spec = parse_config(KIMI_K2)
    assert spec.architecture == "DeepseekV3ForCausalLM"
    assert (spec.moe.num_experts, spec.moe.num_groups, spec.rope.theta) == (384, 1, 50000.0)
    assert parse_config({k: v for k, v in KIMI_K2.items() if k != "architectures"}) == spec


def test_deepseek_v2_routing():
    lite, full = parse_config(V2_LITE), parse_config(V2)
    assert isinstance(lite.attention, MLASpec) and lite.attention.q_lora_rank is None
    assert (lite.moe.num_groups, lite.moe.scoring, lite.moe.correction_bias) == (
        1,
        "softmax",
        False,
    )
    assert (full.moe.num_groups, full.moe.topk_groups, full.moe.group_score) == (8, 3, "max")
    assert full.moe.routed_scaling_factor == 16.0 and not full.moe.norm_topk_prob
    assert lite.rope.mscale == 0.707 and lite.moe.shared_intermediate_size == 2 * 1408


def test_qwen3_layers_and_window():
    spec = parse_config(QWEN3_30B)
    assert spec.attention == GQASpec(32, 4, 128, qk_norm="head")
    assert spec.moe_layers == tuple(range(48)) and spec.moe.norm_topk_prob
    some = parse_config(QWEN3_30B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 5]})
    assert some.moe_layers == tuple(i for i in range(48) if i % 2 == 1 and i not in (1, 5))
    window = {"sliding_window": 4096}
    assert parse_config(QWEN3_30B | window).attention == spec.attention
    used = parse_config(QWEN3_30B | window | {"use_sliding_window": True}).attention
    assert isinstance(used, GQASpec) and used.sliding_window == 4096


def test_mixtral_and_olmoe():
    mixtral, olmoe = parse_config(MIXTRAL), parse_config(OLMOE | {"clip_qkv": 8.0})
    assert mixtral.attention == GQASpec(32, 8, 128)
    assert mixtral.moe.norm_topk_prob and mixtral.rope.theta == 1e6
    assert parse_config(MIXTRAL | {"sliding_window": 4096}).attention == GQASpec(
        32, 8, 128, sliding_window=4096
    )
    assert olmoe.attention == GQASpec(16, 16, 128, qk_norm="full", clip_qkv=8.0)
    assert not olmoe.moe.norm_topk_prob


def test_rope_as_transformers_5_writes_it():
    old = parse_config(V3)
    new = copy.deepcopy(V3)
    scaling = new.pop("rope_scaling")
    scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    assert parse_config(new) == old
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config(OLMOE | plain).rope.theta == 5e5


@pytest.mark.parametrize("theta", [{"rope_theta": 7e6}, {}], ids=["theta", "no theta"])
@pytest.mark.parametrize("saved_anew", [True, False])
def test_rope_scaling_by_hand_counts(saved_anew, theta):
    """Also in a config that transformers 5 wrote, and with a theta of its own."""
    config = QWEN3_30B | {
        "rope_scaling": YARN_BY_HAND | theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e5} if saved_anew else None,
    }
    theirs = AutoConfig.for_model(**copy.deepcopy(config)).rope_parameters
    spec = parse_config(config)
    ours = spec.rope
    assert (ours.kind, ours.theta, ours.factor, ours.original_max_position) == (
        theirs["rope_type"], theirs["rope_theta"], theirs["factor"],
        theirs["original_max_position_embeddings"],
    )  # fmt: skip
    assert spec.max_position == 131072


def test_rope_scaling_beside_parameters_keeps_their_theta():
    new = {k: v for k, v in QWEN3_30B.items() if k != "rope_theta"}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}
    rope = parse_config(new | {"rope_scaling": YARN_BY_HAND}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 3e5)


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        ("v3", "rms_norm_eps rope_theta routed_scaling_factor n_group topk_group norm_topk_prob "
               "first_k_dense_replace n_shared_experts q_lora_rank rope_interleave"),
        ("v2", "rms_norm_eps rope_theta routed_scaling_factor first_k_dense_replace "
               "n_shared_experts q_lora_rank norm_topk_prob"),
        ("qwen", "rms_norm_eps rope_theta num_key_value_heads norm_topk_prob decoder_sparse_step "
                 "mlp_only_layers head_dim tie_word_embeddings"),
        ("mixtral", "rms_norm_eps rope_theta num_key_value_heads head_dim sliding_window"),
        ("olmoe", "rms_norm_eps rope_theta num_key_value_heads norm_topk_prob clip_qkv"),
    ],
)  # fmt: skip
def test_a_missing_key_means_what_it_means_to_transformers(base, keys):
    config = {key: value for key, value in CONFIGS[base].items() if key not in keys.split()}
    theirs = AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    assert parse_config(config) == parse_config(
        config | {key: theirs.get(key) for key in keys.split()}
    )


def test_yarn_added_to_a_model_stretches_its_positions():
    scaling = YARN_BY_HAND
    spec = parse_config(QWEN3_30B | {"rope_scaling": scaling})
    assert (spec.max_position, spec.rope.original_max_position) == (131072, 32768)
    new = {k: v for k, v in QWEN3_30B.items() if k not in ("rope_theta", "rope_scaling")}
    assert parse_config(new | {"rope_parameters": scaling | {"rope_theta": 1e6}}) == spec
    assert parse_config(V3).max_position == 163840  # which its authors stretched themselves
    for other in (
        scaling | {"factor": 1.1},
        scaling | {"rope_type": "linear"},
        {"rope_type": "yarn", "factor": 4.0},
    ):
        assert parse_config(QWEN3_30B | {"rope_scaling": other}).max_position == 40960


@pytest.mark.parametrize("eos", [7, [7, 8]])
def test_one_or_several_eos(eos):
    assert parse_config(MIXTRAL | {"eos_token_id": eos}).eos_token_ids[0] == 7


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        ("v3", {"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not supported"),
        ("v3", {"architectures": [], "model_type": "gpt2"}, "supported: DeepseekV2ForCausalLM"),
        ("v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("v3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("v3", {"quantization_config": {"quant_method": "awq"}}, "quantization 'awq'"),
        ("v3", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
        ("v3", {"rope_scaling": {"type": "llama3", "factor": 8}}, "rope scaling 'llama3'"),
        ("v3", {"rope_scaling": {"type": "yarn"}}, "key 'factor' is missing"),
        ("v3", {"rope_scaling": ["yarn"]}, "rope_scaling ['yarn']; expected an object"),
        ("v3", {"num_experts_per_tok": 257}, "num_experts_per_tok 257 of 256"),
        ("v3", {"n_group": 7}, "n_group 7"),
        ("v3", {"topk_group": 9}, "topk_group 9 of n_group 8"),
        ("v3", {"first_k_dense_replace": 61}, "none of the layers"),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("qwen", {"num_attention_heads": 0}, "config.json: "),
        ("qwen", {"num_key_value_heads": 5}, "no multiple of num_key_value_heads 5"),
        ("qwen", {"hidden_size": "wide"}, "config.json: "),
        ("qwen", {"vocab_size": 0}, "vocab_size 0; expected a whole number from 1"),
        ("qwen", {"vocab_size": 1.5}, "vocab_size 1.5; expected a whole number"),
        ("qwen", {"num_hidden_layers": 10**9}, "expected a whole number from 1 to 16777216"),
        ("qwen", {"vocab_size": True}, "vocab_size True; expected a whole number"),
        ("v3", {"architectures": {"a": 1}}, "architectures {'a': 1}; expected a list of names"),
        ("v3", {"architectures": [["a"]]}, "architectures [['a']]; expected a list of names"),
        ("v3", {"architectures": [], "model_type": ["x"]}, "model_type ['x']; expected a name"),
        (
            "v3",
            {"quantization_config": FP8 | {"weight_block_size": [128]}},
            "_size [128]; expected",
        ),
        (
            "v3",
            {"quantization_config": FP8 | {"weight_block_size": [0, 0]}},
            "_size [0, 0]; expect",
        ),
        ("v3", {"quantization_config": FP8 | {"weight_block_size": [128, -1]}}, "_size [128, -1]"),
        (
            "v3",
            {"quantization_config": FP8 | {"weight_block_size": 128}},
            "_size 128; expected two",
        ),
        ("v3", {"quantization_config": "fp8"}, "quantization_config 'fp8'; expected an object"),
        (
            "v3",
            {"rope_scaling": YARN | {"factor": -4}},
            "factor -4; expected a finite number above",
        ),
        (
            "v3",
            {"rope_scaling": YARN | {"mscale": math.inf}},
            "mscale inf; expected a finite number",
        ),
        (
            "v3",
            {"rope_scaling": YARN | {"truncate": "no"}},
            "truncate 'no'; expected true or false",
        ),
        ("v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63; expected an even number"),
        ("v3", {"routed_scaling_factor": -1}, "routed_scaling_factor -1; expected a finite number"),
        ("v3", {"first_k_dense_replace": -1}, "first_k_dense_replace -1; expected a whole number"),
        ("v3", {"n_group": 256}, "topk_group 4 groups of 1 experts"),
        (
            "v3",
            {"n_group": 128, "topk_group": 1},
            "num_experts_per_tok 8 of topk_group 1 groups of 2",
        ),
        ("qwen", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0; expected a finite"),
        ("qwen", {"rope_theta": -5}, "rope_theta -5; expected a finite number above 0"),
        ("qwen", {"rms_norm_eps": math.nan}, "rms_norm_eps nan; expected a finite number above 0"),
        ("qwen", {"num_key_value_heads": -2}, "num_key_value_heads -2; expected a whole number"),
        ("qwen", {"head_dim": -4}, "head_dim -4; expected a whole number from 1"),
        ("qwen", {"head_dim": 33}, "head_dim 33; expected an even number"),
        ("qwen", {"eos_token_id": [None]}, "eos_token_id [None]; expected a token id, a list"),
        ("qwen", {"eos_token_id": [1.5, "a"]}, "eos_token_id [1.5, 'a']; expected a token id"),
        ("qwen", {"eos_token_id": "2"}, "eos_token_id '2'; expected a token id"),
        ("qwen", {"bos_token_id": "a"}, "bos_token_id 'a'; expected a whole number from 0"),
        ("qwen", {"tie_word_embeddings": "false"}, "embeddings 'false'; expected true or false"),
        ("qwen", {"norm_topk_prob": 1}, "norm_topk_prob 1; expected true or false"),
        ("qwen", {"mlp_only_layers": ["1"]}, "mlp_only_layers ['1']; expected a list of layers"),
        ("qwen", {"decoder_sparse_step": -1}, "decoder_sparse_step -1; expected a whole number"),
        ("mixtral", {"sliding_window": "4096"}, "sliding_window '4096'; expected a whole number"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv 0; expected a finite number above 0"),
        ("mixtral", {"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_what_is_refused(base, change, words):
    with pytest.raises(CheckpointError) as caught:
        parse_config(CONFIGS[base] | change)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_missing_key_is_named(name):
    config = CONFIGS[name]
    for key in ("hidden_size", "num_experts_per_tok", "vocab_size"):
        with pytest.raises(CheckpointError, match=f"key '{key}' is missing"):
            parse_config({k: v for k, v in config.items() if k != key})


def test_load_spec(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        load_spec(tmp_path)
    path = tmp_path / "config.json"
    for content in (b"{", b"\xff", b"[]", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json: (not valid|expected)"):
            load_spec(tmp_path)
    path.write_text(json.dumps(MIXTRAL))
    assert isinstance(load_spec(tmp_path), ModelSpec)
    assert load_spec(path) == load_spec(tmp_path)  # a config.json by whatever name
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_spec(tmp_path)
    path.rmdir()
    path.write_text(json.dumps(MIXTRAL))
    assert load_spec(tmp_path) == parse_config(MIXTRAL)
