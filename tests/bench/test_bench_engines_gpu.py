"""`bench engine` and `bench steps` on GPUs: two layers of a real shape, random weights."""

import json

import pytest

from crossdock.bench import engine, engine_run
from crossdock.bench.anchors import Anchors, Load
from crossdock.bench.engine_variants import EngineOptions, parse_compared
from crossdock.bench.steps import MEASURES, StepsOptions, run_steps
from crossdock.bench.steps_report import report

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def gpus():
    import torch

    return min(2, torch.cuda.device_count())


def small(**more):
    return {**Anchors().settings, "layers": 2, "max_model_len": 512, "max_num_seqs": 64, **more}


def test_engines_one_after_another(monkeypatch):
    loads = (Load("few", 8, (200, 200), 1), Load("many", 16 * gpus(), (100, 100), 20))
    monkeypatch.setattr(engine_run, "loads_of", lambda options: loads)
    compared = parse_compared("graphs,overlap=sbo")  # which this model refuses
    run = engine_run.run_engines(
        EngineOptions(
            "qwen3-30b-a3b",
            ranks=(gpus(),),
            anchors=("all",),
            repeats=2,
            compare=compared,
            settings=small(),
        )
    )
    document = engine.report(run, "bench engine").document()
    json.dumps(document)
    assert [e["variant"].partition("thread")[2] for e in document["engines"]] == [
        "",
        ", graphs off",
        ", again at the end",
    ]
    assert "shared expert" in next(iter(document["refused"].values()))
    rates = [c for c in document["cases"] if c["name"].endswith("put_throughput")]
    assert len(rates) == 6 and all(c["median"] > 0 and c["n"] == 2 for c in rates)
    graphs = [e["ranks"][0]["graphs"] for e in document["engines"]]
    assert "sizes of decodes" in graphs[0] and "as asked" in graphs[1]


def test_steps():
    measure = tuple(m for m in MEASURES if m != "ranks" or gpus() > 1)
    options = StepsOptions(
        "deepseek-v2-lite", gpus(), "cuda", measure, 2, 2, small(layers=3, max_model_len=2048)
    )
    document = report(run_steps(options), "bench steps").document()
    cases = {(c["name"], c["shape"]["variant"]): c for c in document["cases"]}
    assert all(c["median"] > 0 for (name, _), c in cases.items() if "off" not in name)
    assert cases["step_time", "64 decodes at 1,024: tbo"]["how"] == "tbo, graph of 64"
    assert cases["step_time", "2,048 tokens of prompts: off"]["how"] == "off, graph of 2048"
    assert cases["step_time", "2,048 tokens of prompts: tbo"]["how"] == "tbo, graph of 2048"
    kinds = {variant.split(": ")[1] for name, variant in cases if name == "layer_time"}
    assert kinds == {"dense layer", "moe layer"}
    mbu = next(c for (name, _), c in cases.items() if name == "experts_mbu")
    assert mbu["median"] > 0
