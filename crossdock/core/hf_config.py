"""From a Hugging Face config.json to a `ModelSpec`, without running anybody's code.

The one file outside `models/` that names architectures: it is their configs' vocabulary, kept here
because the planner needs it without torch. Everything else acts on the fields of `ModelSpec`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossdock.core.errors import CheckpointError
from crossdock.core.json_values import (
    flag,
    is_whole,
    number,
    number_or_null,
    table,
    token_ids,
    weight_block,
    whole,
    whole_or_null,
)
from crossdock.core.model_spec import (
    GQASpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QuantSpec,
    RopeSpec,
    check_spec,
)

Config = dict[str, Any]


def load_spec(model_dir: Path) -> ModelSpec:
    """The spec of the checkpoint in `model_dir`, or of a config.json by whatever name.

    Raises:
        CheckpointError: config.json is missing, is not JSON, lacks a key, has a value that no
            model can have or names an architecture that is not supported.
    """
    path = Path(model_dir)
    if path.suffix != ".json" or path.is_dir():
        path = path / "config.json"
    return parse_config(read_config(path), str(path))


def read_config(path: Path) -> Config:
    """The parsed config.json. Raises CheckpointError, naming the file."""
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; a model directory holds a config.json") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return config


def parse_config(config: Config, where: str = "config.json") -> ModelSpec:
    """`config`: the parsed config.json; `where` names it in errors. Keys that transformers has a
    default for may be missing, and mean that one."""
    try:
        name = _architecture(config)
        spec = _PARSERS[name](name, config)
        check_spec(spec)
    except KeyError as missing:
        raise CheckpointError(f"{where}: key {missing} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {config['hidden_act']!r}; expected 'silu'")
    return spec


def _architecture(config: Config) -> str:
    names, model_type = config.get("architectures") or [], config.get("model_type") or ""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures {names!r}; expected a list of names")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type {model_type!r}; expected a name")
    # Kimi-K2 calls itself DeepseekV3ForCausalLM with a model_type of its own.
    name = names[0] if names else _BY_MODEL_TYPE.get(model_type, model_type)
    if name not in _PARSERS:
        raise ValueError(
            f"architecture {name or '(none)'!r} is not supported; "
            f"supported: {', '.join(sorted(_PARSERS))}"
        )
    return name


def _rope(config: Config, dim: int, interleaved: bool, default_theta: float = 10000.0) -> RopeSpec:
    scaling = _scaling(config)
    places = (scaling, config, table(config, "rope_parameters"))
    given = next((p for p in places if p.get("rope_theta") is not None), {})
    theta = number(given, "rope_theta", default_theta)
    kind = _scaling_kind(scaling)
    if kind == "default":
        return RopeSpec(dim, theta, interleaved)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: linear, yarn")
    original = whole_or_null(scaling, "original_max_position_embeddings")
    return RopeSpec(
        dim,
        theta,
        interleaved,
        kind=kind,
        factor=number(scaling, "factor"),
        original_max_position=original or whole(config, "max_position_embeddings"),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        mscale=number(scaling, "mscale", 0.0, zero=True),
        mscale_all_dim=number(scaling, "mscale_all_dim", 0.0, zero=True),
        attention_factor=number_or_null(scaling, "attention_factor"),
        truncate=flag(scaling, "truncate", True),
    )


def _scaling(config: Config) -> Config:
    # transformers 5 writes rope_parameters; most on the hub have rope_theta and rope_scaling.
    # With both the older one counts, as there: whoever stretches a model by hand adds that one.
    return table(config, "rope_scaling") or table(config, "rope_parameters")


def _scaling_kind(scaling: Config) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _max_position(config: Config) -> int:
    """Yarn that was added to a model as published stretches its positions beyond their number."""
    given, scaling = whole(config, "max_position_embeddings"), _scaling(config)
    original = whole_or_null(scaling, "original_max_position_embeddings")
    if _scaling_kind(scaling) != "yarn" or original is None:
        return given
    return max(given, int(original * number(scaling, "factor")))


def _quant(config: Config) -> QuantSpec | None:
    quant = table(config, "quantization_config")
    if not quant:
        return None
    block = quant.get("weight_block_size")
    if quant.get("quant_method") != "fp8" or not block:
        raise ValueError(
            f"quantization {quant.get('quant_method')!r} with weight_block_size {block} is not "
            "supported; supported: fp8 with weight_block_size [128, 128]"
        )
    return QuantSpec(weight_block(block))


def _common(config: Config, eps: float = 1e-6) -> dict[str, Any]:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {
        "num_layers": whole(config, "num_hidden_layers"),
        "hidden_size": whole(config, "hidden_size"),
        "intermediate_size": whole(config, "intermediate_size"),
        "vocab_size": whole(config, "vocab_size"),
        "rms_norm_eps": number(config, "rms_norm_eps", eps),
        "max_position": _max_position(config),
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
        "dtype": str(dtype).removeprefix("torch."),
        "quant": _quant(config),
        "bos_token_id": whole_or_null(config, "bos_token_id", least=0),
        "eos_token_ids": token_ids(config, "eos_token_id"),
    }


def _deepseek(name: str, config: Config) -> ModelSpec:
    v3 = name == "DeepseekV3ForCausalLM"
    attention = MLASpec(
        num_heads=whole(config, "num_attention_heads"),
        q_lora_rank=whole_or_null(config, "q_lora_rank", 1536),
        kv_lora_rank=whole(config, "kv_lora_rank"),
        qk_nope_head_dim=whole(config, "qk_nope_head_dim"),
        qk_rope_head_dim=whole(config, "qk_rope_head_dim"),
        v_head_dim=whole(config, "v_head_dim"),
        bias=flag(config, "attention_bias"),
    )
    common = _common(config)
    first = whole_or_null(config, "first_k_dense_replace", 3 if v3 else 0, least=0) or 0
    every = config.get("moe_layer_freq", 1)
    if every != 1:
        raise ValueError(f"moe_layer_freq {every} is not supported; expected 1")
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(
            config, attention.qk_rope_head_dim, flag(config, "rope_interleave", True) or not v3
        ),
        moe=_deepseek_moe(config, v3),
        moe_layers=tuple(range(first, common["num_layers"])),
        mlp_bias=flag(config, "mlp_bias") and not v3,
        **common,
    )


def _deepseek_moe(config: Config, v3: bool) -> MoESpec:
    width = whole(config, "moe_intermediate_size")
    method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
    allowed = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in allowed:
        raise ValueError(f"topk_method {method!r} is not supported; supported: {allowed}")
    scoring = config.get("scoring_func", "sigmoid" if v3 else "softmax")
    if scoring != ("sigmoid" if v3 else "softmax"):
        raise ValueError(f"scoring_func {scoring!r} is not supported for this architecture")
    norm = flag(config, "norm_topk_prob", v3)
    if norm and not v3:
        # DeepSeek's code then drops routed_scaling_factor, transformers ignores the flag.
        raise ValueError("norm_topk_prob true: the references disagree on it for DeepSeek-V2")
    groups, chosen = (8, 4) if v3 else (None, None)
    grouped = method != "greedy" and (whole_or_null(config, "n_group", groups) or 1) > 1
    shared = whole_or_null(config, "n_shared_experts", 1 if v3 else 2, least=0) or 0
    return MoESpec(
        num_experts=whole(config, "n_routed_experts"),
        top_k=whole(config, "num_experts_per_tok"),
        intermediate_size=width,
        scoring=scoring,
        num_groups=whole(config, "n_group", groups) if grouped else 1,
        topk_groups=whole(config, "topk_group", chosen) if grouped else 1,
        group_score="top2" if v3 else "max",
        correction_bias=v3,
        norm_topk_prob=norm,
        routed_scaling_factor=number(config, "routed_scaling_factor", 2.5 if v3 else 1.0),
        shared_intermediate_size=width * shared,
    )


def _gqa(config: Config, kv_heads: int | None = None, **extra: Any) -> GQASpec:
    """`kv_heads`: where the key is missing; None: as many as of queries, as null always means."""
    heads = whole(config, "num_attention_heads")
    return GQASpec(
        num_heads=heads,
        num_kv_heads=whole_or_null(config, "num_key_value_heads", kv_heads) or heads,
        head_dim=whole_or_null(config, "head_dim") or whole(config, "hidden_size") // heads,
        **extra,
    )


def _experts(config: Config, key: str, other: str) -> int:
    return whole(config, other if config.get(key) is None else key)


def _qwen3_moe(name: str, config: Config) -> ModelSpec:
    bias = flag(config, "attention_bias")
    window = None
    if flag(config, "use_sliding_window"):
        window = whole_or_null(config, "sliding_window", 4096)
    attention = _gqa(config, 4, qk_norm="head", bias=bias, output_bias=bias, sliding_window=window)
    common = _common(config)
    step, dense = whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_whole(i, 0) for i in dense):
        raise ValueError(f"mlp_only_layers {dense!r}; expected a list of layers")
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False),
        moe=MoESpec(
            num_experts=_experts(config, "num_experts", "num_local_experts"),
            top_k=whole(config, "num_experts_per_tok"),
            intermediate_size=whole(config, "moe_intermediate_size"),
            norm_topk_prob=flag(config, "norm_topk_prob"),
        ),
        moe_layers=tuple(
            i for i in range(common["num_layers"]) if i not in dense and (i + 1) % step == 0
        ),
        **common,
    )


def _mixtral(name: str, config: Config) -> ModelSpec:
    attention = _gqa(config, 8, sliding_window=whole_or_null(config, "sliding_window"))
    common = _common(config, eps=1e-5)
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False, default_theta=1e6),
        moe=MoESpec(
            num_experts=_experts(config, "num_local_experts", "num_experts"),
            top_k=whole(config, "num_experts_per_tok"),
            intermediate_size=common["intermediate_size"],
            norm_topk_prob=True,  # a softmax over the chosen ones, which is the same
        ),
        moe_layers=tuple(range(common["num_layers"])),
        **common,
    )


def _olmoe(name: str, config: Config) -> ModelSpec:
    bias = flag(config, "attention_bias")
    attention = _gqa(
        config,
        qk_norm="full",
        bias=bias,
        output_bias=bias,
        clip_qkv=number_or_null(config, "clip_qkv"),
    )
    common = _common(config, eps=1e-5)
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False),
        moe=MoESpec(
            num_experts=_experts(config, "num_experts", "num_local_experts"),
            top_k=whole(config, "num_experts_per_tok"),
            intermediate_size=common["intermediate_size"],
            norm_topk_prob=flag(config, "norm_topk_prob"),
        ),
        moe_layers=tuple(range(common["num_layers"])),
        **common,
    )


_PARSERS: dict[str, Callable[[str, Config], ModelSpec]] = {
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
}
ARCHITECTURES = frozenset(_PARSERS)
"""Those that the engine runs."""
_BY_MODEL_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
