"""FP8 products split over the ranks of an attention group, beside the same ones whole."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

# Heads of 128 and a dense width of four blocks, which two ranks split between blocks.
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 160,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 128,
    "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 128, "n_group": 4,
    "topk_group": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_split_products_are_the_whole_ones(tmp_path: Path, device: str, run_ranks) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    draw = np.random.default_rng(7)
    texts = [draw.integers(3, 96, n).tolist() for n in (13, 2, 8)]
    config = {
        "model": str(path), "load": "dummy", "ranks": 2, "max_num_batched_tokens": 64,
        "page_size": 4, "transport": "nvlink", "dtype": "bfloat16", "quantize": "fp8",
        "deadline_s": 60, "max_num_seqs": 8, "kv_memory_gib": 0.02, "low_latency_tokens": 8,
        "attention": "torch", "overlap": "sbo", "device": device,
    }  # fmt: skip
    job = {"prefill": 11, "stagger": 1, "symmetric_bytes": 8 << 20}
    whole = run_ranks(config, texts, **job)
    split = run_ranks({**config, "tp": 2}, texts, **job)
    one, two = np.concatenate(whole), np.concatenate(split)
    away = np.linalg.norm(one - two, axis=1) / np.linalg.norm(one, axis=1)
    # Rounding alone; scales of other blocks give a third and more. A token whose experts were a
    # close choice may get others.
    assert np.median(away) < 0.1 and one.std() > 0.1
