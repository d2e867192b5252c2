"""From what a user calls a model to its `ModelSpec`, also for models that no code here can run."""

from pathlib import Path
from typing import Any

from crossdock.core import (
    CheckpointError,
    ConfigError,
    GQASpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QuantSpec,
    RopeSpec,
    UserError,
    parse_config,
    read_config,
)
from crossdock.core.json_values import weight_block
from crossdock.core.model_spec import check_spec
from crossdock.core.recipes import check_keys, find_recipe, read_toml, recipe_names

_COMMON: dict[str, Any] = {
    "architecture": str,
    "num_hidden_layers": int,
    "hidden_size": int,
    "intermediate_size": int,
    "vocab_size": int,
    "max_position_embeddings": int,
    "tie_word_embeddings": bool,
    "dtype": str,
    "weight_block_size": list,
    "num_attention_heads": int,
    "n_routed_experts": int,
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "n_shared_experts": int,
    "first_k_dense_replace": int,
    "n_group": int,
    "topk_group": int,
}
_NEEDED = _COMMON.keys() - {
    "architecture",
    "intermediate_size",
    "tie_word_embeddings",
    "dtype",
    "weight_block_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
}
_GQA = {"num_key_value_heads": int, "head_dim": int}
_MLA = {
    "q_lora_rank": int,
    "kv_lora_rank": int,
    "qk_nope_head_dim": int,
    "qk_rope_head_dim": int,
    "v_head_dim": int,
}


def load_model(source: str | Path) -> ModelSpec:
    """`source`: a model directory, a config.json, a TOML of dimensions (keys named as in
    config.json), the name of a shipped recipe (`deepseek-v3`) or a Hugging Face id.

    Raises:
        UserError: nothing of the kind is there, or what is wrong in it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        path = find_recipe("models", str(source)) or _from_hub(str(source))
    if path.suffix == ".toml":
        return parse_dimensions(read_toml(path), str(path))
    if path.suffix != ".json":
        raise ConfigError(f"{path}: expected a directory, a config.json or a .toml of dimensions")
    config = read_config(path)
    try:
        return parse_config(config, str(path))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; to plan with it all the same, give a .toml of its dimensions, like "
            "recipes/models/glm-4.5.toml"
        ) from None


def _from_hub(name: str) -> Path:
    known = f"shipped: {', '.join(recipe_names('models'))}"
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise UserError(
            f"no model {name!r}: neither a file, a directory, an owner/name nor {known}"
        )
    # Importing it takes a good part of a second, and a recipe does without.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # no such repository, no access, no network: the hub's own words
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name!r}: its config.json was not downloaded: {reason}; give a path, or one {known}"
        ) from None


def parse_dimensions(values: dict[str, Any], where: str) -> ModelSpec:
    """A model from dimensions alone, for planning; routing and positions are left at defaults.

    With `kv_lora_rank` its attention is MLA, else GQA. `weight_block_size` given: FP8 weights.

    Raises:
        ConfigError: names the key.
    """
    mla = "kv_lora_rank" in values
    heads = _MLA if mla else _GQA
    check_keys(where, values, {**_COMMON, **heads}, _NEEDED | (heads.keys() - {"q_lora_rank"}))
    v = {"dtype": "bfloat16", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, **values}
    zero_is_none = {"n_shared_experts", "first_k_dense_replace"}
    for key, value in v.items():
        if key not in zero_is_none and value == 0 and not isinstance(value, bool):
            raise ConfigError(f"{where}: {key} = 0; expected at least 1")
    layers, dense = v["num_hidden_layers"], v["first_k_dense_replace"]
    if dense >= layers:
        raise ConfigError(
            f"{where}: first_k_dense_replace = {dense} of {layers} layers: no experts"
        )
    if dense and "intermediate_size" not in v:
        raise ConfigError(f"{where}: missing: intermediate_size, of the {dense} dense layers")
    try:
        spec = _spec(v, mla)
        check_spec(spec)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return spec


def _spec(v: dict[str, Any], mla: bool) -> ModelSpec:
    layers, width = v["num_hidden_layers"], v["moe_intermediate_size"]
    block = v.get("weight_block_size")
    return ModelSpec(
        architecture=v.get("architecture", "unnamed"),
        num_layers=layers,
        hidden_size=v["hidden_size"],
        intermediate_size=v.get("intermediate_size", width),
        vocab_size=v["vocab_size"],
        attention=_attention(v, mla),
        rope=RopeSpec(v["qk_rope_head_dim"] if mla else v["head_dim"], 10000.0),
        moe=MoESpec(
            num_experts=v["n_routed_experts"],
            top_k=v["num_experts_per_tok"],
            intermediate_size=width,
            num_groups=v["n_group"],
            topk_groups=v["topk_group"],
            shared_intermediate_size=width * v.get("n_shared_experts", 0),
        ),
        moe_layers=tuple(range(v["first_k_dense_replace"], layers)),
        rms_norm_eps=1e-6,
        max_position=v["max_position_embeddings"],
        tie_word_embeddings=v.get("tie_word_embeddings", False),
        dtype=v["dtype"],
        quant=None if block is None else QuantSpec(weight_block(block)),
    )


def _attention(v: dict[str, Any], mla: bool) -> GQASpec | MLASpec:
    if not mla:
        return GQASpec(v["num_attention_heads"], v["num_key_value_heads"], v["head_dim"])
    return MLASpec(
        num_heads=v["num_attention_heads"],
        q_lora_rank=v.get("q_lora_rank"),
        kv_lora_rank=v["kv_lora_rank"],
        qk_nope_head_dim=v["qk_nope_head_dim"],
        qk_rope_head_dim=v["qk_rope_head_dim"],
        v_head_dim=v["v_head_dim"],
    )
