"""What of the experts a rank reads, and that replicas and idle steps change nothing."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from crossdock.balance import linear_placement
from crossdock.comm import LocalTransport
from crossdock.core import CheckpointError, Placement, load_spec
from crossdock.metrics import Recorder
from crossdock.models import ModelContext, build_model
from crossdock.models.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")
EXPERTS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=16, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


class Recording:
    def __init__(self, source: Checkpoint):
        self.source, self.asked = source, Counter()
        self.has, self.get_slice = source.has, source.get_slice

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> torch.Tensor:
        self.asked[name] += 1
        return self.source.get(name, shape, fp32)


def build(path: Path, placement: Placement, rank: int):
    spec = load_spec(path)
    context = ModelContext(
        rank, torch.device("cpu"), torch.float32, False, placement, LocalTransport(False),
        Recorder(), 64,
    )  # fmt: skip
    with Checkpoint(path, None, torch.float32) as source, torch.inference_mode():
        recording = Recording(source)
        return build_model(spec, recording, context), recording.asked


def test_a_rank_reads_only_its_experts_and_each_once(checkpoint: Path) -> None:
    slots = np.array([[0, 1, 1, 2, 3, -1, 4, 5], [5, 5, 0, 3, 1, 2, 4, -1]])
    _, asked = build(checkpoint, Placement(0, slots, EXPERTS, 2), rank=0)
    experts = {name: n for name, n in asked.items() if ".experts." in name}
    held = [(0, e) for e in (0, 1, 2)] + [(1, e) for e in (5, 0, 3)]
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight": 1
        for layer, e in held
        for part in ("gate", "up", "down")
    }
    assert set(asked.values()) == {1}


def test_replicas_give_the_same_logits(checkpoint: Path, session) -> None:
    tokens = list(range(3, 40))
    want = session(checkpoint).step({"x": tokens})["x"]
    for redundant in (1, 7):
        placement = linear_placement(2, EXPERTS, 1, redundant)
        ours = session(checkpoint)
        ours.model = build(checkpoint, placement, 0)[0]
        torch.testing.assert_close(ours.step({"x": tokens})["x"], want, rtol=1e-5, atol=1e-5)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    class Without(Recording):
        def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> torch.Tensor:
            return super().get(name.replace("k_norm", "absent"), shape, fp32)

    spec = load_spec(checkpoint)
    context = ModelContext(
        0, torch.device("cpu"), torch.float32, False, linear_placement(2, EXPERTS, 1),
        LocalTransport(False), Recorder(), 64,
    )  # fmt: skip
    with (
        Checkpoint(checkpoint, None, torch.float32) as source,
        pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.absent\.weight"),
    ):
        build_model(spec, Without(source), context)
