"""Captured steps on GPUs, exchanges between them included: the same logits as eager steps, in each
overlap mode, with ranks that have little or nothing to do, and after experts have moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crossdock.core.recipes import recipes_dir

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
            {"model": "qwen3-30b-a3b", "layers": 2, "kv_cache_dtype": "fp8"}, id="fp8-cache"
        ),
        pytest.param(
            {"model": "every-deepseek-v2-lite", "layers": 3, "kv_cache_dtype": "fp8"},
            id="fp8-cache-mla",
        ),
        pytest.param(
            {"model": "every-qwen3-30b-a3b", "layers": 2, "attention": "flashinfer"},
            id="flashinfer",
        ),
        pytest.param(
            {"model": "every-deepseek-v2-lite", "layers": 3, "attention": "flashinfer"},
            id="flashinfer-mla",
        ),
    ],
)
def test_replayed_steps_give_the_logits_of_eager_ones(tmp_path, model, ranks, tp):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if model.get("attention") == "flashinfer":
        pytest.importorskip("flashinfer", reason="needs FlashInfer")
    if model["model"].startswith("every-"):
        model = {**model, "model": str(every_expert(model["model"], tmp_path))}
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
    errors = {}
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["moved"][0] == len(range(model["layers"])) - (
            1 if "lite" in model["model"] else 0
        )
        assert found["moved"][1] is None
        for when in ("before", "after"):
            errors |= {(rank, when, step, mode): error for step, mode, error in found[when]}
    assert len(errors) > 20
    assert not {at: error for at, error in errors.items() if error >= 0.02}, errors


def every_expert(name, folder):
    """The model `every-<name>`: <name> with 8 experts that all tokens go to. What rounds otherwise,
    a code of the cache or another kernel, would send some to other experts, of random weights."""
    config = json.loads((recipes_dir() / "models" / f"{name[6:]}.json").read_text())
    experts = {key: 8 for key in ("n_routed_experts", "num_experts") if key in config}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**config, **experts, "num_experts_per_tok": 8}))
    return path
