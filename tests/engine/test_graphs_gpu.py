"""Captured steps on GPUs, exchanges between them included: the same logits as eager steps, in each
overlap mode, with ranks that have little or nothing to do, and after experts have moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
SETTINGS = {
    "load": "dummy", "device": "cuda", "dtype": "bfloat16", "attention": "triton",
    "transport": "nvlink", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512,
    "kv_memory_gib": 1.0, "overlap": "off", "rebalance": "manual", "rebalance_step_mib": 200.0,
}  # fmt: skip


@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(
    "model",
    [
        {"model": "deepseek-v2-lite", "layers": 3},
        {"model": "qwen3-30b-a3b", "layers": 2},
        pytest.param(
            {
                "model": "qwen3-30b-a3b",
                "layers": 2,
                "replica_choice": "quota",
                "redundant_experts": 8,
            },
            id="quota",
        ),
        pytest.param(
            {"model": "qwen3-30b-a3b", "layers": 2, "attention": "flashinfer"}, id="flashinfer"
        ),
        pytest.param(
            {"model": "deepseek-v2-lite", "layers": 3, "attention": "flashinfer"},
            id="flashinfer-mla",
        ),
    ],
)
def test_replayed_steps_give_the_logits_of_eager_ones(tmp_path, model, ranks, tp):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if model.get("attention") == "flashinfer":
        pytest.importorskip("flashinfer", reason="needs FlashInfer")
    job = {
        "ranks": ranks,
        "store": str(tmp_path / "store"),
        "config": {**SETTINGS, **model, "tp": tp},
        "out": str(tmp_path),
    }
    script = Path(__file__).with_name("graphs_rank.py")
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), json.dumps(job)])
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=150) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    compared = 0
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["moved"][0] == len(range(model["layers"])) - (
            1 if "lite" in model["model"] else 0
        )
        assert found["moved"][1] is None
        for step, mode, error in found["before"] + found["after"]:
            assert error < 0.02, f"rank {rank}, step {step}, {mode}: {error}"
            compared += 1
    assert compared > 20
