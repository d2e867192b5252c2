"""What a real rank times and counts of its steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch

from crossdock.comm import build_world
from crossdock.core import ConfigError, EngineConfig, Request, SamplingParams, load_spec
from crossdock.engine import Engine, build_engine, timing
from crossdock.metrics import Recorder, StepTimer

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"
HARDWARE = """memory_gbytes_per_s = 10.0
[matmul_tflop_per_s]
float32 = 0.1
"""


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    (tmp_path / "mine.toml").write_text(HARDWARE)
    config = EngineConfig(
        str(STORYTELLER), device="cpu", transport="local", max_num_seqs=4, max_model_len=96,
        kv_memory_gib=0.01, hardware=str(tmp_path / "mine.toml"),
    )  # fmt: skip
    world = build_world(0, 1, "cpu", "local", {}, str(tmp_path / "store"), 60.0)
    engine = build_engine(config, world, lambda done, total: None)
    yield engine
    engine.close()


def parameters(keep) -> int:
    """Of the checkpoint, those whose name `keep` takes."""
    raw = (STORYTELLER / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return sum(int(torch.Size(shape).numel()) for name, shape in shapes.items() if keep(name))


def test_a_timed_step_counts_the_work_that_was_done(engine):
    spec = load_spec(STORYTELLER)
    engine.timer = StepTimer(engine.recorder, engine.timer._work, every=1)  # every step
    prompt, outputs = tuple(range(300, 311)), 5
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    engine.add(Request("a", prompt, params, key=1))
    used, dense_kv, rows, begin = [], [], engine.recorder.rows_LS, perf_counter()
    for context in [len(prompt)] + [len(prompt) + n for n in range(1, outputs)]:
        before, counted = rows.clone(), engine.recorder.counters.get("timed_bytes", 0)
        engine.step()
        used.append(int((rows > before).sum()))
        kv = context * spec.kv_bytes_per_token("float32")
        dense_kv.append(engine.recorder.counters["timed_bytes"] - counted - kv)
    assert used[1:] == [len(spec.moe_layers) * spec.moe.top_k] * (outputs - 1)
    expert = 4 * spec.expert_params
    (dense,) = {left - slots * expert for left, slots in zip(dense_kv, used, strict=True)}
    want = parameters(lambda n: ".experts." not in n and "embed_tokens" not in n)
    assert dense == 4 * want
    counters = engine.recorder.counters
    assert counters["steps"] == outputs
    seconds = engine.recorder.seconds
    inside = seconds["attention"] + seconds["experts"] + seconds["sample"]
    assert inside <= counters["timed_ns"] / 1e9 <= perf_counter() - begin
    decodes = sum(spec.flops_per_token(len(prompt) + n) for n in range(1, outputs))
    assert 0 < counters["timed_flops"] - decodes < len(prompt) * spec.flops_per_token(len(prompt))


def test_a_rank_knows_its_ceilings_and_no_part_of_a_gpu(engine):
    assert engine.info["ceilings"]["flops_per_s"] == 0.1e12
    assert "gpu_activity" not in engine.info
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request("a", (5, 6, 7), params, key=1))
    while not engine.step().sleep:
        pass
    seconds = engine.recorder.seconds
    assert {"step", "agree", "attention", "router", "experts", "shared", "sample"} <= set(seconds)
    assert "host_gap" not in seconds
    inside = sum(v for part, v in seconds.items() if part not in ("step", "wait", "counts"))
    assert inside <= seconds["step"]


def test_a_known_gpu_starts_in_any_dtype(monkeypatch):
    """Though what it reaches is not known in float32."""
    name, watched = "NVIDIA H200", (None, "no such card")
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(
        timing.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u")
    )
    monkeypatch.setattr(timing, "watch_gpu", lambda uuid: watched)
    config, cuda = EngineConfig("m"), torch.device("cuda")
    known, unknown = (
        timing.timing_info(config, Recorder(), cuda, dtype, False)
        for dtype in ("bfloat16", "float32")
    )
    assert known["ceilings"]["source"] == "h200.toml"
    assert unknown == {"ceilings": None, "gpu_activity": "no such card"}
    asked = EngineConfig("m", hardware="h200")
    with pytest.raises(ConfigError, match="float32"):
        timing.timing_info(asked, Recorder(), cuda, "float32", False)
