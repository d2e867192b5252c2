"""Engines in FP8 by the settings, in Triton's interpreter, and where they are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock import LLM, SamplingParams
from crossdock.core import ConfigError, EngineConfig
from crossdock.engine import read_spec
from crossdock.engine.quantize import why_not_fp8

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 160, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 300,
    "intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QUANT = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INTERPRETED = {"device": "cpu", "dtype": "bfloat16", "transport": "nvlink"}


def write(path: Path, **more: Any) -> Path:
    path.write_text(json.dumps({**TINY, **more}))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_dummy_weights_of_a_quantised_config_are_fp8(tmp_path) -> None:
    """Sizes that are no multiple of 128 are padded; what is held is summed to the byte. Quotas go
    beside this transport too."""
    path = write(tmp_path / "tiny.json", quantization_config=QUANT)
    settings = {**INTERPRETED, "load": "dummy", "kv_memory_gib": 0.01, "overlap": "off"}
    settings |= {"max_num_batched_tokens": 32, "low_latency_tokens": 4, "replica_choice": "quota"}
    with LLM(str(path), ranks=2, **settings) as llm:
        info = llm.client.info
        outputs = llm.generate(["abc", "de"], GREEDY)
        ranks = [rank.values for rank in llm.client.snapshots(60)]
    assert all(rank["calls"]["counts"] > 0 for rank in ranks)
    assert all(len(o.outputs[0].token_ids) == 3 for o in outputs)
    assert all(rank["fp8"] and rank["transport"] == "nvlink" for rank in info)
    # Embedding, head, three norms and two of a head; the router in fp32.
    plain = 2 * (2 * 300 * 160 + 3 * 160 + 2 * 64) + 4 * 4 * 160
    # 160 channels are 256; k's 64 rows are 128, since v starts at a block. Then scales.
    products = (128 + 128 + 64) * 256 + 160 * 128 + 4 * (3 * 2 + 2 * 1)
    experts = 2 * (256 * 256 + 256 * 128 + 4 * (2 * 2 + 2 * 1))
    assert [rank["weight_bytes"] for rank in info] == [plain + products + experts] * 2


def test_where_fp8_cannot_run_it_is_refused_or_dequantised(tmp_path) -> None:
    path = write(tmp_path / "tiny.json")
    dummy = {"load": "dummy", "kv_memory_gib": 0.01}
    with pytest.raises(ConfigError, match='quantize = "fp8" cannot run: activations must be bf'):
        LLM(str(path), quantize="fp8", device="cpu", **dummy)
    with pytest.raises(ConfigError, match="\"nvlink\" transport, not of 'local'"):
        LLM(str(path), quantize="fp8", **{**INTERPRETED, "transport": "local"}, **dummy)
    quantised = write(tmp_path / "quantised.json", quantization_config=QUANT)
    with LLM(str(quantised), device="cpu", **dummy) as llm:
        assert llm.client.config.quantize == "none" and not llm.client.info[0]["fp8"]
    odd = write(tmp_path / "odd.json", quantization_config={**QUANT, "weight_block_size": [64, 64]})
    config = EngineConfig(str(odd), **INTERPRETED)
    why = why_not_fp8(config, read_spec(config), torch.device("cpu"), "bfloat16", "nvlink")
    assert why is not None and "blocks of [64, 64]" in why
    with pytest.raises(ConfigError, match="quantize must be one of auto, none, fp8"):
        EngineConfig("m", quantize="int4")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_slice_of_deepseek_v3_is_held_in_fp8() -> None:
    """Three dense layers and one of 256 experts, of a config that ships."""
    with LLM("deepseek-v3", load="dummy", layers=4, kv_memory_gib=0.5, max_model_len=512) as llm:
        (info,) = llm.client.info
        spec = llm.client.spec
        outputs = llm.generate(["abc"], GREEDY)
    assert len(outputs[0].outputs[0].token_ids) == 3
    kept = 2 * spec.vocab_size * spec.hidden_size
    kept += 4 * 512 * 128 * (128 + 128)  # kv_b of four layers
    want = (spec.num_params - kept) * (1 + 4 / 128**2) + 2 * kept
    assert info["fp8"] and info["weight_bytes"] == pytest.approx(want, rel=2e-3)


@pytest.mark.gpu
def test_a_plain_checkpoint_is_quantised_as_it_is_loaded(storyteller: Path) -> None:
    """Sizes of the demo model are no multiples of 128."""
    prompt = "Once upon a time there was"
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = {}
    for quantize in ("none", "fp8"):
        with LLM(str(storyteller), quantize=quantize, kv_memory_gib=0.05) as llm:
            (info,) = llm.client.info
            tokens[quantize] = llm.generate([prompt], params)[0].outputs[0].token_ids
        assert info["fp8"] == (quantize == "fp8")
    same = sum(a == b for a, b in zip(tokens["none"], tokens["fp8"], strict=True))
    assert same >= 4  # what follows a first difference is another story
