"""Every architecture on 1, 2 and 4 ranks against transformers, logit by logit; in invariant mode
against itself, bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossdock.core import load_spec
from crossdock.core.tensor_parallel import why_not_tp

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
    "initializer_range": 0.15, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 12, "num_experts_per_tok": 4,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 40,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {
        **MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 3.0,
    },
    "DeepseekV3": {
        **MLA, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
    },
    "Qwen3Moe": {
        "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
        "norm_topk_prob": True,
    },
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.8},
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(**{**COMMON, **CASES[request.param]})
    torch.manual_seed(len(request.param))
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "correction_bias" in key:
                tensor.normal_(std=0.2)
            elif "norm" in key:
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model, path


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 96, n).tolist() for n in lengths]


# 3 of 5 experts a rank, empty ranks, replicas in the left-over slots: every case has its oddity.
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_agree_with_transformers(case, ranks: int, run_ranks) -> None:
    model, path = case
    texts = prompts(ranks, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": ranks, "max_num_batched_tokens": 64, "page_size": 4,
              "transport": "collective" if ranks == 2 else "auto", "deadline_s": 60}  # fmt: skip
    config |= {"max_num_seqs": 8, "kv_memory_gib": 0.02}
    got = run_ranks(config, texts, chunk=7, prefill=25, stagger=1)
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text])).logits[0].numpy()
        assert logits.shape == want.shape
        np.testing.assert_allclose(logits, want, atol=1e-4, rtol=0)


SPLIT = {"DeepseekV2": (4, 4), "DeepseekV3": (4, 2), "Qwen3Moe": (4, 2), "Mixtral": (2, 2)}
"""Ranks and tp, which divides neither the tokens of a step nor all prompts."""


def test_split_attention_agrees_with_transformers(case, run_ranks) -> None:
    model, path = case
    name = next((name for name in SPLIT if type(model).__name__.startswith(name)), None)
    if name is None:
        refusals = why_not_tp(load_spec(path), 2, None)
        assert refusals == ["its norms of queries and keys go over all heads"]
        return
    ranks, tp = SPLIT[name]
    texts = prompts(ranks + tp, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": ranks, "tp": tp, "max_num_batched_tokens": 64,
              "page_size": 4, "max_num_seqs": 8, "kv_memory_gib": 0.02}  # fmt: skip
    got = run_ranks(config, texts, chunk=7, prefill=25, stagger=1)
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text])).logits[0].numpy()
        np.testing.assert_allclose(logits, want, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_split_attention_on_cuda(case, ranks: int, tp: int, attention: str, run_ranks) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    model, path = case
    if why_not_tp(load_spec(path), tp, None):
        pytest.skip(f"tp = {tp} cannot split it")
    texts = prompts(ranks + tp, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": ranks, "tp": tp, "max_num_batched_tokens": 64,
              "page_size": 4, "max_num_seqs": 8, "kv_memory_gib": 0.02, "device": "cuda",
              "dtype": "float32" if attention == "torch" else "bfloat16",
              "attention": attention}  # fmt: skip
    got = run_ranks(config, texts, chunk=7, prefill=25, stagger=1)
    atol = 1e-4
    if attention == "triton":
        one = run_ranks({**config, "ranks": 1, "tp": 1}, texts, chunk=7, prefill=25, stagger=1)
        atol = None
    for i, (text, logits) in enumerate(zip(texts, got, strict=True)):
        with torch.inference_mode():
            want = model(torch.tensor([text])).logits[0].numpy()
        if atol is not None:
            np.testing.assert_allclose(logits, want, atol=atol, rtol=0)
        else:  # no farther from float32 than one rank in BF16
            assert np.abs(logits - want).mean() < 1.5 * np.abs(one[i] - want).mean() + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_cuda_logits_agree_with_transformers(case, ranks: int, run_ranks) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    model, path = case
    texts = prompts(ranks, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": ranks, "max_num_batched_tokens": 64, "page_size": 4,
              "device": "cuda", "dtype": "float32"}  # fmt: skip
    config |= {"max_num_seqs": 8, "kv_memory_gib": 0.02}
    got = run_ranks(config, texts, chunk=7, prefill=25, stagger=1)
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text])).logits[0].numpy()
        np.testing.assert_allclose(logits, want, atol=1e-4, rtol=0)


def test_invariant_logits_do_not_depend_on_anything(case, run_ranks) -> None:
    """Alone and whole on one rank, against chunked, staggered, mixed and with replicas on four."""
    _, path = case
    texts = prompts(5, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": 1, "max_num_batched_tokens": 64, "page_size": 4,
              "invariant": True, "max_num_seqs": 8, "kv_memory_gib": 0.02}  # fmt: skip
    alone = [run_ranks(config, [text], prefill=1000)[0] for text in texts]
    mixed = run_ranks({**config, "ranks": 4}, texts, chunk=7, prefill=25, stagger=1)
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"), [("DeepseekV3", "bfloat16"), ("Qwen3Moe", "float32")], indirect=["case"]
)
def test_invariant_logits_on_gpus(case, dtype: str, run_ranks) -> None:
    """As on CPUs, on as many as two GPUs; alone is one after another, each prompt in one step."""
    _, path = case
    texts = prompts(5, (41, 1, 23, 37, 9))
    config = {"model": str(path), "ranks": 1, "max_num_batched_tokens": 64, "page_size": 4,
              "invariant": True, "max_num_seqs": 8, "kv_memory_gib": 0.02, "device": "cuda",
              "dtype": dtype}  # fmt: skip
    alone = run_ranks(config, texts, prefill=1000, stagger=1)
    for chunk, ranks in ((7, min(2, torch.cuda.device_count())), (16, 1)):
        mixed = run_ranks({**config, "ranks": ranks}, texts, chunk=chunk, prefill=25, stagger=1)
        for one, other in zip(alone, mixed, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("device", "attention"),
    [("cpu", "torch"), pytest.param("cuda", "triton", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("case", ["DeepseekV3", "Qwen3Moe"], indirect=True)
def test_an_fp8_cache_costs_some_percent(case, device: str, attention: str, run_ranks) -> None:
    """Of the logits; a token whose experts were a close choice may get others."""
    _, path = case
    texts = prompts(7, (41, 1, 23))
    config = {"model": str(path), "ranks": 1, "max_num_batched_tokens": 64, "page_size": 4,
              "max_num_seqs": 4, "kv_memory_gib": 0.02, "device": device, "dtype": "bfloat16",
              "attention": attention}  # fmt: skip
    whole, small = (
        np.concatenate(run_ranks({**config, "kv_cache_dtype": kept}, texts, chunk=9, prefill=25))
        for kept in ("auto", "fp8")
    )
    error_T = np.linalg.norm(small - whole, axis=1) / np.linalg.norm(whole, axis=1)
    assert 1e-4 < np.median(error_T) < 0.15


def test_missing_path_is_refused(tmp_path: Path) -> None:
    from crossdock import LLM
    from crossdock.core import UserError

    with pytest.raises(UserError, match="not found"):
        LLM(str(tmp_path / "nowhere"))
