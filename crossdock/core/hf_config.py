"""From a Hugging Face config.json to a `ModelSpec`, without running anybody's code.

The one file outside `models/` that names architectures: it is their configs' vocabulary, kept here
because the planner needs it without torch. Everything else acts on the fields of `ModelSpec`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossdock.core.errors import CheckpointError
from crossdock.core.model_spec import (
    DTYPE_BYTES,
    GQASpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QuantSpec,
    RopeSpec,
)

Config = dict[str, Any]


def load_spec(model_dir: Path) -> ModelSpec:
    """The spec of the checkpoint in `model_dir`, or of a config.json by whatever name.

    Raises:
        CheckpointError: config.json is missing, is not JSON, lacks a key or names an architecture
            that is not supported.
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
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return config


def parse_config(config: Config, where: str = "config.json") -> ModelSpec:
    """`config`: the parsed config.json; `where` names it in errors."""
    names = config.get("architectures") or []
    model_type = config.get("model_type", "")
    # Kimi-K2 calls itself DeepseekV3ForCausalLM with a model_type of its own.
    name = names[0] if names else _BY_MODEL_TYPE.get(model_type, model_type)
    if name not in _PARSERS:
        raise CheckpointError(
            f"{where}: architecture {name or '(none)'!r} is not supported; "
            f"supported: {', '.join(sorted(_PARSERS))}"
        )
    try:
        spec = _PARSERS[name](name, config)
        _check(spec)
    except KeyError as missing:
        raise CheckpointError(f"{where}: key {missing} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {config['hidden_act']!r}; expected 'silu'")
    return spec


def _check(spec: ModelSpec) -> None:
    """Raises ValueError for numbers that no model can have."""
    moe, attention = spec.moe, spec.attention
    sizes = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_attention_heads": attention.num_heads,
        "the experts' intermediate size": moe.intermediate_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} must be positive")
    if not 1 <= moe.top_k <= moe.num_experts:
        raise ValueError(f"num_experts_per_tok {moe.top_k} of {moe.num_experts} experts")
    if moe.num_experts % moe.num_groups or not 1 <= moe.topk_groups <= moe.num_groups:
        raise ValueError(
            f"topk_group {moe.topk_groups} of n_group {moe.num_groups} of {moe.num_experts} experts"
        )
    if not spec.moe_layers:
        raise ValueError("none of the layers has routed experts")
    if isinstance(attention, GQASpec) and attention.num_heads % attention.num_kv_heads:
        raise ValueError(
            f"num_attention_heads {attention.num_heads} is no multiple of num_key_value_heads "
            f"{attention.num_kv_heads}"
        )
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {spec.dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")


def _rope(config: Config, dim: int, interleaved: bool, default_theta: float = 10000.0) -> RopeSpec:
    # transformers 5 writes rope_parameters; everything on the hub has rope_theta and rope_scaling.
    new = config.get("rope_parameters") or {}
    scaling = new or config.get("rope_scaling") or {}
    theta = float(new.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSpec(dim, theta, interleaved)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: linear, yarn")
    original = scaling.get("original_max_position_embeddings")
    return RopeSpec(
        dim,
        theta,
        interleaved,
        kind=kind,
        factor=float(scaling["factor"]),
        original_max_position=int(original or config["max_position_embeddings"]),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=float(scaling.get("mscale") or 0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0),
        attention_factor=scaling.get("attention_factor"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _eos(config: Config) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)


def _quant(config: Config) -> QuantSpec | None:
    quant = config.get("quantization_config")
    if not quant:
        return None
    block = quant.get("weight_block_size")
    if quant.get("quant_method") != "fp8" or not block:
        raise ValueError(
            f"quantization {quant.get('quant_method')!r} with weight_block_size {block} is not "
            "supported; supported: fp8 with weight_block_size [128, 128]"
        )
    return QuantSpec((int(block[0]), int(block[1])))


def _common(config: Config) -> dict[str, Any]:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {
        "num_layers": int(config["num_hidden_layers"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "vocab_size": int(config["vocab_size"]),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position": int(config["max_position_embeddings"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": str(dtype).removeprefix("torch."),
        "quant": _quant(config),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": _eos(config),
    }


def _deepseek(name: str, config: Config) -> ModelSpec:
    v3 = name == "DeepseekV3ForCausalLM"
    attention = MLASpec(
        num_heads=int(config["num_attention_heads"]),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=int(config["qk_nope_head_dim"]),
        qk_rope_head_dim=int(config["qk_rope_head_dim"]),
        v_head_dim=int(config["v_head_dim"]),
        bias=bool(config.get("attention_bias", False)),
    )
    common = _common(config)
    first, every = int(config.get("first_k_dense_replace") or 0), config.get("moe_layer_freq", 1)
    if every != 1:
        raise ValueError(f"moe_layer_freq {every} is not supported; expected 1")
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(
            config, attention.qk_rope_head_dim, bool(config.get("rope_interleave", True)) or not v3
        ),
        moe=_deepseek_moe(config, v3),
        moe_layers=tuple(range(first, common["num_layers"])),
        mlp_bias=bool(config.get("mlp_bias", False)) and not v3,
        **common,
    )


def _deepseek_moe(config: Config, v3: bool) -> MoESpec:
    width = int(config["moe_intermediate_size"])
    method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
    allowed = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in allowed:
        raise ValueError(f"topk_method {method!r} is not supported; supported: {allowed}")
    scoring = config.get("scoring_func", "sigmoid" if v3 else "softmax")
    if scoring != ("sigmoid" if v3 else "softmax"):
        raise ValueError(f"scoring_func {scoring!r} is not supported for this architecture")
    norm = bool(config.get("norm_topk_prob", v3))
    if norm and not v3:
        # DeepSeek's code then drops routed_scaling_factor, transformers ignores the flag.
        raise ValueError("norm_topk_prob true: the references disagree on it for DeepSeek-V2")
    grouped = method != "greedy" and (config.get("n_group") or 1) > 1
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=width,
        scoring=scoring,
        num_groups=int(config["n_group"]) if grouped else 1,
        topk_groups=int(config["topk_group"]) if grouped else 1,
        group_score="top2" if v3 else "max",
        correction_bias=v3,
        norm_topk_prob=norm,
        routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
        shared_intermediate_size=width * int(config.get("n_shared_experts") or 0),
    )


def _gqa(config: Config, **extra: Any) -> GQASpec:
    heads = int(config["num_attention_heads"])
    return GQASpec(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        **extra,
    )


def _qwen3_moe(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    attention = _gqa(config, qk_norm="head", bias=bias, output_bias=bias, sliding_window=window)
    common = _common(config)
    experts = int(config.get("num_experts") or config["num_local_experts"])
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False),
        moe=MoESpec(
            num_experts=experts,
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["moe_intermediate_size"]),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        ),
        moe_layers=tuple(
            i for i in range(common["num_layers"]) if i not in dense and (i + 1) % step == 0
        ),
        **common,
    )


def _mixtral(name: str, config: Config) -> ModelSpec:
    attention = _gqa(config, sliding_window=config.get("sliding_window"))
    common = _common(config)
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False, default_theta=1e6),
        moe=MoESpec(
            num_experts=int(config.get("num_local_experts") or config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=common["intermediate_size"],
            norm_topk_prob=True,  # a softmax over the chosen ones, which is the same
        ),
        moe_layers=tuple(range(common["num_layers"])),
        **common,
    )


def _olmoe(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    attention = _gqa(
        config, qk_norm="full", bias=bias, output_bias=bias, clip_qkv=config.get("clip_qkv")
    )
    common = _common(config)
    return ModelSpec(
        architecture=name,
        attention=attention,
        rope=_rope(config, attention.head_dim, False),
        moe=MoESpec(
            num_experts=int(config.get("num_experts") or config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=common["intermediate_size"],
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
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
