"""A block-quantised checkpoint in FP8 over the nvlink transport, against transformers with the
same weights dequantised: in Triton's interpreter on 1 and 2 ranks, and on GPUs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

# What is no multiple of 128 rows is here: 192 of kv_a, 384 of q_b with heads of 96, F of 192.
SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 160,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4,
    "topk_group": 2, "initializer_range": 0.06, "pad_token_id": None,
}  # fmt: skip
FP8 = torch.float8_e4m3fn


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, value) of a matrix, block by block of 128x128."""
    codes, value = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    blocks = [-(-n // 128) for n in weight.shape]
    scales = torch.empty(blocks)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            at = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            # No two blocks alike, so that a scale in the wrong place is seen.
            block = weight[at] * 2 ** float(np.random.default_rng((i, j)).uniform(-1, 1))
            scales[i, j] = block.abs().max() / 448
            codes[at] = (block / scales[i, j]).to(FP8)
            value[at] = codes[at].float() * scales[i, j]
    return codes, scales, value


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model of the dequantised weights, the block-quantised checkpoint)"""
    plain, path = (tmp_path_factory.mktemp(name) for name in ("plain", "fp8"))
    torch.manual_seed(5)
    config = transformers.DeepseekV3Config(**SIZES)
    made = transformers.DeepseekV3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if "correction_bias" in name:
                tensor.normal_(std=0.2)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    made.save_pretrained(plain)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        values[name] = stored[name] = tensor
        if name.endswith("_proj.weight") or "_with_mqa" in name:
            assert tensor.dim() == 2
            codes, scales, value = in_blocks(tensor.float())
            stored |= {name: codes, f"{name}_scale_inv": scales}
            values[name] = value
    assert sum(t.dtype == FP8 for t in stored.values()) > 3 * SIZES["n_routed_experts"]
    save_file(stored, path / "model.safetensors")
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    quant = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    document = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, "quantization_config": quant}))
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return model.eval(), path


def errors(model: Any, texts: list[list[int]], got: list[np.ndarray]) -> np.ndarray:
    """Per token, the distance of the logits over the size of the right ones."""
    parts = []
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text])).logits[0].float().cpu().numpy()
        assert logits.shape == want.shape
        parts.append(np.linalg.norm(logits - want, axis=1) / np.linalg.norm(want, axis=1))
    return np.concatenate(parts)


def run(path: Path, ranks: int, run_ranks: Any, **settings: Any) -> tuple[Any, Any]:
    draw = np.random.default_rng(ranks)
    texts = [draw.integers(3, 96, n).tolist() for n in (13, 1, 8)]
    config = {
        "model": str(path), "ranks": ranks, "max_num_batched_tokens": 64, "page_size": 4,
        "transport": "nvlink", "dtype": "bfloat16", "deadline_s": 60, "max_num_seqs": 8,
        "kv_memory_gib": 0.02, "low_latency_tokens": 8, "overlap": "sbo",
        "attention": "torch", **settings,
    }  # fmt: skip
    got = run_ranks(config, texts, prefill=11, stagger=1, symmetric_bytes=8 << 20)
    return texts, got


@pytest.mark.parametrize("ranks", [1, 2])
def test_native_logits_are_near_transformers(case, ranks: int, run_ranks) -> None:
    """Grouped rows of a prefill and masked rows of decodes; a token whose experts were a close
    choice may get others."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    model, path = case
    found = errors(model, *run(path, ranks, run_ranks))
    # Other blocks' scales for a third of the experts alone give 0.35 and 0.38.
    assert np.median(found) < 0.15 and np.quantile(found, 0.75) < 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_native_logits_on_gpus(case, ranks: int, run_ranks) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    model, path = case
    found = errors(model, *run(path, ranks, run_ranks, device="cuda"))
    assert np.median(found) < 0.15 and np.quantile(found, 0.75) < 0.2
