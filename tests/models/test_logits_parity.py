"""Logits and greedy tokens against transformers, for the variants that real checkpoints have."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 32,
    "beta_slow": 1,
}
V2 = {**MLA, "q_lora_rank": None}
V3 = {**MLA, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}
GQA = {"num_key_value_heads": 2, "num_experts_per_tok": 3}
QWEN = {**GQA, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}
OLMOE = {**GQA, "num_experts": 8}
MIXTRAL = {**GQA, "num_local_experts": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-greedy": ("DeepseekV2", {**V2, "topk_method": "greedy"}),
    "v2-groups-yarn": (
        "DeepseekV2",
        {
            **V2,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2-mlp-bias": ("DeepseekV2", {**V2, "mlp_bias": True, "attention_bias": True}),
    "v3": ("DeepseekV3", V3),
    "v3-yarn": (
        "DeepseekV3",
        {**V3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "v3-yarn-plain": ("DeepseekV3", {**V3, "rope_parameters": YARN, "rms_norm_eps": 1e-4}),
    "v3-no-q-lora-no-norm": (
        "DeepseekV3",
        {**V3, "q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
    "v3-bias-tied": ("DeepseekV3", {**V3, "attention_bias": True, "tie_word_embeddings": True}),
    "v3-half-split": ("DeepseekV3", {**V3, "rope_interleave": False, "q_lora_rank": None}),
    "qwen3": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3-mixed-layers": (
        "Qwen3Moe",
        {
            **QWEN,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-yarn": ("Qwen3Moe", {**QWEN, "rope_parameters": YARN, "norm_topk_prob": True}),
    "qwen3-linear": (
        "Qwen3Moe",
        {**QWEN, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mixtral": ("Mixtral", {**MIXTRAL, "sliding_window": None}),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 11}),
    "olmoe": ("Olmoe", {**OLMOE, "norm_topk_prob": False}),
    "olmoe-clip": (
        "Olmoe",
        {**OLMOE, "clip_qkv": 0.8, "norm_topk_prob": True, "attention_bias": True},
    ),
}


def write_checkpoint(name: str, path: Path, **save: Any) -> Any:
    """A random model of the case, saved; norms, biases and correction biases are not trivial."""
    family, options = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **options})
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "correction_bias" in key:
                tensor.normal_(std=0.2)
            elif "norm" in key:
                tensor.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                tensor.normal_(std=0.3)
    model.save_pretrained(path, **save)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(request.param, path), path


@torch.inference_mode()
def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill_chunks_and_decode_agree_with_transformers(case, session) -> None:
    model, path = case
    ours = session(path)
    a, b, c = prompt(61, 1), prompt(33, 2), prompt(50, 3)
    want = {"a": reference(model, a), "b": reference(model, b), "c": reference(model, c)}
    got = {"a": [], "b": [], "c": []}
    # c whole; a in odd chunks beside others; b's tail and a's last tokens one by one.
    schedule = [
        {"a": a[:7], "b": b[:20]},
        {"a": a[7:8], "c": c},
        {"b": b[20:21], "a": a[8:31]},
        {"b": b[21:22], "a": a[31:58]},
        {"a": a[58:59], "b": b[22:31]},
        {"a": a[59:60], "b": b[31:32]},
        {"a": a[60:], "b": b[32:]},
    ]
    for work in schedule:
        for name, rows in ours.step(work).items():
            got[name].append(rows)
    for name in want:
        assert (torch.cat(got[name]) - want[name]).abs().max() < 1e-4, name
    assert want["a"].std() > 0.1  # logits that a mistake would move


@torch.inference_mode()
def test_greedy_tokens_agree_with_transformers(case, session) -> None:
    model, path = case
    ours = session(path)
    start = prompt(40, 4)
    out = model.generate(
        torch.tensor([start]), do_sample=False, max_new_tokens=64, eos_token_id=None
    )
    want, got = out[0, len(start) :].tolist(), []
    tokens = start
    for _ in range(64):
        tokens = [int(ours.step({"x": tokens})["x"][-1].argmax())]
        got += tokens
    assert got == want


@pytest.mark.parametrize("name", ["v3", "mixtral", "qwen3", "olmoe"])
def test_fused_expert_tensors_load_alike(name: str, tmp_path: Path, session) -> None:
    write_checkpoint(name, tmp_path / "split")
    write_checkpoint(name, tmp_path / "fused", save_original_format=False)
    tokens = prompt(20, 5)
    split, fused = (
        session(tmp_path / kind).step({"x": tokens})["x"] for kind in ("split", "fused")
    )
    assert torch.equal(split, fused)


def test_a_rank_without_tokens_runs(case, session) -> None:
    _, path = case
    assert session(path).step({}) == {}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["v3", "mixtral-window"])
def test_decodes_of_unequal_length(name: str, tmp_path: Path, session, monkeypatch) -> None:
    """One long sequence between short ones: they are decoded in several groups."""
    monkeypatch.setattr("crossdock.layers.attention.plan.SPLIT_GAIN", 40)
    model = write_checkpoint(name, tmp_path)
    ours = session(tmp_path)
    prompts = {f"s{i}": prompt(n, 20 + i) for i, n in enumerate((9, 140, 8, 60, 10, 139, 2))}
    ours.step({key: tokens[:-1] for key, tokens in prompts.items()})
    for key, rows in ours.step({key: tokens[-1:] for key, tokens in prompts.items()}).items():
        assert (rows[0] - reference(model, prompts[key])[-1]).abs().max() < 1e-4, key
