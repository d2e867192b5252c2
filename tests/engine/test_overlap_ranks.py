"""Steps over rank processes with nothing, the shared expert or half a batch between dispatch and
combine: the same logits and tokens, to the bit in invariant mode."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossdock.comm import SharedMemory, shm_bytes

SCRIPT = Path(__file__).with_name("overlap_rank.py")
VOCAB, HIDDEN, TOP_K, PAGE, TOKENS = 96, 48, 3, 4, 24
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 3,
    "moe_intermediate_size": 16, "num_experts_per_tok": TOP_K, "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "dtype": "bfloat16",
    "hidden_act": "silu", "intermediate_size": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense first, shared expert": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    },
    "no shared expert": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 12,
        "num_key_value_heads": 2, "num_experts": 6, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
CASES = {
    f"{model}, {size} {kind}{', invariant' if invariant else ''}": (model, size, kind, invariant)
    for model, size, kind, invariant in (
        ("dense first, shared expert", 1, "local", False),
        ("dense first, shared expert", 1, "local", True),
        ("dense first, shared expert", 2, "shm", False),
        ("dense first, shared expert", 2, "shm", True),
        ("dense first, shared expert", 4, "shm", True),
        ("dense first, shared expert", 2, "collective", False),
        ("no shared expert", 2, "shm", True),
        ("no shared expert", 4, "shm", False),
    )
}


def draw_steps(rng: np.random.Generator, ranks: int) -> list[list[list[Any]]]:
    """By step and rank: (sequence, start, tokens, sample) of every item, decodes first."""

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    def by_rank(make) -> list[list[Any]]:
        return [make(rank) for rank in range(ranks)]

    last = ranks - 1
    return [
        # A long prompt that is cut, and several that are not; one rank has few tokens, one none.
        by_rank(lambda r: [[0, 0, tokens(19), True]] if r == 0 else
                [[0, 0, tokens(2), True]] if r == last else
                [[0, 0, tokens(6), True], [1, 0, tokens(7), False]]),
        by_rank(lambda r: [] if r == last and ranks > 1 else
                [[0, 19 if r == 0 else 6, tokens(1), True], [2, 0, tokens(17), False]]),
        # Of all ranks only one has a token, and of halves only the second.
        by_rank(lambda r: [[2, 17, tokens(1), True]] if r == 0 else []),
        # Decodes alone, and decodes beside the rest of a prompt.
        by_rank(lambda r: [[0, 20, tokens(1), True], [2, 18, tokens(1), True],
                           [3, 0, tokens(1), True], [4, 0, tokens(1), True]] if r == 0 else
                [[3, 0, tokens(1), True], [5, 0, tokens(11), True], [6, 0, tokens(5), True]]),
        by_rank(lambda r: [[3, 1, tokens(1), True], [4, 1 if r == 0 else 0, tokens(13), True]]),
    ]  # fmt: skip


def run(root: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Of every case, by name, what each of its ranks wrote. Starting processes is what costs."""
    cases, memories = [], []
    for number, (name, (model, size, kind, invariant)) in enumerate(CASES.items()):
        directory = root / str(number)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**COMMON, **MODELS[model]}))
        memory = SharedMemory.create(
            shm_bytes(size, TOKENS, HIDDEN, TOP_K, 4, invariant) if kind == "shm"
            else shm_bytes(size)
        )  # fmt: skip
        memories.append(memory)
        rng = np.random.default_rng(number)
        lengths = ((30, 5), (1,), (), (9, 8, 7))
        cases.append({
            "size": size, "fd": memory.fd, "directory": str(directory), "layers": 3,
            "shared": model == "dense first, shared expert", "steps": draw_steps(rng, size),
            "requests": [[rng.integers(0, VOCAB, n).tolist() for n in lengths[r]]
                         for r in range(size)],
            "config": {
                "model": str(directory / "config.json"), "load": "dummy", "ranks": size,
                "device": "cpu", "dtype": "float32", "transport": kind, "invariant": invariant,
                "max_num_batched_tokens": TOKENS, "page_size": PAGE, "max_num_seqs": 8,
                "kv_memory_gib": 0.002, "prefix_caching": False,
            },
        })  # fmt: skip
        cases[-1]["name"] = name
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), json.dumps(cases)],
            pass_fds=[memory.fd for memory in memories],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    try:
        assert [process.wait(timeout=280) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for memory in memories:
            memory.close_fd()
    return {
        case["name"]: [
            dict(np.load(Path(case["directory"]) / f"rank{rank}.npz"))
            for rank in range(case["size"])
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    return run(tmp_path_factory.mktemp("overlap"))


@pytest.mark.parametrize("name", CASES)
def test_modes_agree(results, name: str) -> None:
    model, _, _, invariant = CASES[name]
    modes = ("sbo", "tbo") if model == "dense first, shared expert" else ("tbo",)
    for rank in results[name]:
        for mode in modes:
            got, want = rank[f"logits {mode}"], rank["logits off"]
            assert want.std() > 0.1  # so that a row in another's place would show
            if invariant:
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)
            np.testing.assert_array_equal(rank[f"tokens {mode}"], rank["tokens off"])
        np.testing.assert_array_equal(rank["tokens mixed"], rank["tokens off"])


@pytest.mark.parametrize("name", CASES)
def test_steps_run_as_asked_and_alike_on_all_ranks(results, name: str) -> None:
    ranks = results[name]
    off, sbo, tbo = ranks[0]["ran mixed"]
    assert tbo and (sbo if CASES[name][0] == "dense first, shared expert" else off)
    for mode in ("off", "sbo", "tbo"):
        if f"ran {mode}" not in ranks[0]:
            continue
        off, sbo, tbo = ranks[0][f"ran {mode}"]
        assert all((rank[f"ran {mode}"] == (off, sbo, tbo)).all() for rank in ranks)
        assert (sbo > 0, tbo > 0) == (mode == "sbo", mode == "tbo")
        assert not off or mode != "sbo"
    assert len({str(rank["info"]) for rank in ranks}) == 1


def test_the_start_measures_where_rows_travel(results) -> None:
    for name, ranks in results.items():
        _, size, _, _ = CASES[name]
        said = json.loads(str(ranks[0]["info"]))
        assert said["setting"] == "auto"
        assert ("on one rank" in said["why"]) == (size == 1)
        model = CASES[name][0]
        modes = {"off", "sbo", "tbo"} if model == "dense first, shared expert" else {"off", "tbo"}
        first, *measured = said["ladder"]
        assert not first["ms"] and not first["halves"]
        assert all(rung["ms"].keys() == modes and rung["whole"] in modes for rung in measured)
