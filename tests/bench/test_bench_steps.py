"""`bench steps`: batches, parts by layer, and the cases of what ranks answer."""

import io
import json
import random
from types import SimpleNamespace

import pytest
from rich.console import Console

from crossdock.bench.case_table import render
from crossdock.bench.steps import MEASURES, StepsOptions, StepsRun, describe, run_steps
from crossdock.bench.steps_batch import Batch, plan_of
from crossdock.bench.steps_parts import by_layer, totals
from crossdock.bench.steps_report import GIB, report
from crossdock.core import ConfigError, EngineConfig
from crossdock.core.batch import GraphSize
from crossdock.core.hf_config import load_spec
from crossdock.core.recipes import find_recipe
from crossdock.engine.overlap import OverlapPolicy, Rung
from crossdock.engine.runner import How


def test_plans_have_the_shape_that_was_asked_for():
    draw = random.Random()
    for _ in range(100):
        batch = Batch(draw.randrange(9), draw.randrange(1, 90), draw.randrange(2, 300), 40)
        plan = plan_of(batch, 16, 10_000, 50, seed=3)
        assert (plan.num_tokens, plan.num_decodes) == (batch.tokens, batch.decodes)
        assert [item.sample for item in plan.items] == [len(i.tokens) == 1 for i in plan.items]
        pages = [page for item in plan.items for page in item.pages]
        assert len(set(pages)) == len(pages)
        for item in plan.items:
            end = item.start + len(item.tokens)
            assert len(item.pages) == -(-end // 16)
            assert end == batch.context or (item.start == 0 and end <= 41)
    assert (
        describe(Batch(128, 1024, 8064, 2048)) == "128 decodes at 1,024 + 8,064 tokens of prompts"
    )


def test_parts_by_layer():
    spans = [("attention", 2.0), ("dense", 1.0), ("attention", 2.0), ("dispatch", 3.0)]
    spans += [("experts", 5.0), ("attention", 4.0), ("experts", 7.0), ("sample", 1.0)]
    intervals, at = [], 10.0
    for part, took in spans:
        intervals.append((part, at, at + took))
        at += took + 0.5
    found = by_layer(intervals, 3, (1, 2))
    assert found["dense"] == {"layer": 4000.0, "attention": 2000.0, "dense": 1000.0}
    # 2 + 3 + 5 and three gaps; 4 + 7 and one gap, before what is sampled
    assert found["moe"]["layer"] == pytest.approx((11500 + 11500) / 2)
    assert found["moe"]["experts"] == 6000 and found["moe"]["dispatch"] == 1500
    assert totals(intervals)["step"] == pytest.approx(at - 0.5 - 10.0)
    assert by_layer(intervals, 2, (1,)) == {}  # as of two halves: attention twice a layer


def timed(**ms):
    """Of two ranks, the second one slower in all."""
    how = {work: ["off, graph of 128"] for work in ms}
    return [{"ms": {w: [t + r for t in of] for w, of in ms.items()}, "how": how} for r in (0, 1)]


def parts(experts_ms, nbytes, ranks=2, **others):
    of = {"parts_ms": [{"experts": experts_ms, **others}], "layers": [], "experts_bytes": [nbytes]}
    return [of] * ranks


@pytest.fixture
def run():
    """As two GPUs could answer, with 4 TB/s of copy speed."""
    facts = {"overlap": {}, "graphs": "", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    facts |= {"transport": "nvlink", "attention": "triton", "kv_bytes": 40 * GIB}
    facts |= {"kv_tokens": 1 << 20}
    layers = {"moe": {"layer": 4.0, "experts": 3.0}, "dense": {"layer": 1.0, "dense": 0.5}}
    of_layers = [
        {"layers": [layers], "parts_ms": [{"experts": 5.0}], "experts_bytes": [16 * 10**9]}
    ]
    memory = {
        str(tokens): [
            {
                "peak_bytes": {"off": tokens << 20, "tbo": tokens * 3 << 19},
                "held_bytes": 70 * GIB,
                "total_bytes": 140 * GIB,
            }
        ]
        * 2
        for tokens in (512, 2048, 8192)
    }
    answers = {
        "copy": {"": [{"bytes_per_s": [4e12, 4e12]}] * 2},
        "overlap": {"8 decodes at 1,024": timed(off=[9.0, 9.0], tbo=[19.0, 19.0], auto=[9.3, 9.3])},
        "mixed": {"some": timed(one=[5.0], two=[9.0])},
        "layers": {"128 decodes at 4,096": timed(off=[30.0], auto=[29.0])},
        "layers parts": {"128 decodes at 4,096": of_layers * 2},
        "ranks": {"128 decodes at 1,024": timed(off=[9.0])},
        "ranks parts": {"128 decodes at 1,024": parts(4.0, 8e9, dispatch=0.5, combine=0.5)},
        "alone ranks": {"128 decodes at 1,024": timed(off=[12.5])[:1]},
        "alone ranks parts": {"128 decodes at 1,024": parts(7.5, 16e9, 1, dispatch=0.3)},
        "memory": memory,
    }
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 8192, "routing": "uniform"}
    options = StepsOptions("deepseek-v2-lite", 2, "cuda", MEASURES, settings=settings)
    spec = load_spec(find_recipe("models", "deepseek-v2-lite"))
    return StepsRun(options, spec, "NVIDIA H200", [facts] * 2, answers, {})


def test_cases(run):
    made = report(run, "crossdock bench steps")
    document = json.loads(json.dumps(made.document()))
    found = {(c["name"], c["shape"]["variant"]): c for c in document["cases"]}
    assert made.device == "2 x NVIDIA H200"
    slow = found["step_time", "8 decodes at 1,024: tbo"]
    assert slow["median"] == 20.0  # of the slower rank
    auto = found["auto_over_off", "8 decodes at 1,024: auto picked off, graph of 128"]
    assert auto["median"] == 1.03 and auto["reached"] is False
    assert found["one_forward_over_two", "some: one forward / two"]["median"] == 0.6
    mbu = found["experts_mbu", "128 decodes at 4,096: routed experts"]
    assert mbu["median"] == 0.8 and mbu["reached"] is False
    layer = found["layer_time", "128 decodes at 4,096: moe layer"]
    assert layer["median"] == 4.0 and layer["parts_ms"] == {"experts": 3.0, "other": 1.0}
    # 10 ms, and 8 GB more at 4 TB/s.
    label = "one rank, expected: 2 ranks and its further bytes at copy speed"
    wanted = found["ranks_step", label]
    assert wanted["median"] == 12.0 and wanted["copy_gbytes_per_s"] == 4000
    assert (wanted["experts_bytes"], wanted["experts_bytes_alone"]) == (8e9, 16e9)
    off = found["one_rank_off_expected", "one rank, off its further bytes at copy speed"]
    assert off["median"] == pytest.approx(100 * 0.5 / 12) and off["reached"] is True
    assert off["copy_gbytes_per_s"] == 4000
    # The experts' 4 ms once more, which nothing is held against.
    grown = found["ranks_step", "one rank, 2 ranks with the experts' time grown as their bytes"]
    assert grown["median"] == 14.0 and grown["experts_bytes_grow"] == 2.0
    assert found["ranks_step", "the same, with one rank's exchange"]["median"] == 14.0 - 0.7
    label = "one rank, off the experts' time grown as their bytes"
    off = found["one_rank_off_expected", label]
    assert off["median"] == pytest.approx(100 * 1.5 / 14) and off["target"] is None
    assert found["step_peak_memory", "8,192 tokens of prompts: tbo"]["median"] == 12.0
    # 140 GiB * 0.85 less the 30 held, and 4,096 tokens of cache; a MiB for a token.
    cache = 40 * 1024 * 4096 / (1 << 20)
    most = found["most_tokens_that_fit", "off, estimated"]
    assert most["median"] == pytest.approx((140 * 0.85 - 30) * 1024 - cache)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(made))
    assert "moe layer" in console.export_text()


def test_refused_measures():
    with pytest.raises(ConfigError, match="--measure 'speed'"):
        run_steps(StepsOptions("m", 2, "cpu", ("speed",)))
    with pytest.raises(ConfigError, match="--ranks 2"):
        run_steps(StepsOptions("m", 1, "cpu", ("ranks",)))
    with pytest.raises(ConfigError, match="memory is of GPUs"):
        run_steps(StepsOptions("m", 2, "cpu", ("memory",)))


class Graphs:
    """Sizes as an engine might have them; keeps what was captured."""

    def __init__(self):
        self.captured = []

    def need(self, plan):
        return plan.num_tokens if plan.num_decodes < len(plan.items) else 0

    def fit(self, need, tokens):
        rows = next((n for n in (64, 128, 1024, 4096) if n >= max(need, tokens)), None)
        return None if rows is None else GraphSize(need > 0, rows)

    def capture(self, size, overlap, timed=False):
        self.captured.append((size, overlap, timed))


def test_steps_run_as_an_engine_would_run_them():
    from crossdock.bench.steps_rank import Rank, how_of

    policy = OverlapPolicy("auto", (Rung(0, "off"), Rung(2000, "off", True)), "", (Rung(0, "sbo"),))
    graphs = Graphs()
    engine = SimpleNamespace(
        overlap=policy,
        runner=SimpleNamespace(graphs=graphs),
        world=SimpleNamespace(size=2, rank=0),
        info={"kv_tokens": 1 << 20},
    )
    rank = Rank(engine, EngineConfig("m", ranks=2), 100)
    decodes, some = rank.plan(Batch(100, 64)), rank.plan(Batch(4, 64, 900, 300))
    many = rank.plan(Batch(0, 1, 3000, 1500))
    assert how_of(rank, decodes, "auto") == How(128, "sbo", 50, GraphSize(False, 128))
    assert how_of(rank, decodes, "tbo") == How(128, "tbo", 50, GraphSize(False, 128))
    assert how_of(rank, some, "auto") == How(1024, "off", 452, GraphSize(True, 1024))
    assert how_of(rank, some, "off") == How(1024, "off", 0, GraphSize(True, 1024))
    assert [(size.rows, mode) for size, mode, _ in graphs.captured] == [
        (128, "sbo"), (128, "tbo"), (1024, "off"), (1024, "off"),
    ]  # fmt: skip
    assert how_of(rank, many, "auto") == How(4096, "tbo", 1500, GraphSize(True, 4096))
    assert how_of(rank, many, "off", eagerly=True) == How(3000, "off", 0)
    assert len(graphs.captured) == 5
