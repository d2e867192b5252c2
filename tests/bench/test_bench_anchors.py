"""`bench engine` on GPUs: one engine after another, rates per GPU, stored and asked figures."""

import io
import json
from typing import ClassVar

import pytest
from rich.console import Console

from crossdock.bench import engine, engine_run
from crossdock.bench.anchors import Anchors
from crossdock.bench.case_table import render
from crossdock.bench.engine_variants import (
    EngineOptions,
    Variant,
    engine_settings,
    parse_compared,
    variants_of,
)
from crossdock.core import ConfigError, UserError

SECONDS = {"prefill": 1.5, "decode-128": 5.0, "decode-256": 6.0}


class FakeChild:
    """Answers as `engine_ours` on two GPUs; a second slower where it runs eagerly. Keeps count of
    those that are open, since a GPU holds but one."""

    open_now = most_open = 0
    started: ClassVar[list[dict]] = []

    def __init__(self, module, name, threads):
        self.settings = None

    def __enter__(self):
        FakeChild.open_now += 1
        FakeChild.most_open = max(FakeChild.most_open, FakeChild.open_now)
        return self

    def __exit__(self, *_):
        FakeChild.open_now -= 1

    def ask(self, request):
        if self.settings is None:
            self.settings = request
            FakeChild.started.append(request)
            if request["overlap"] == "sbo":
                raise UserError("overlap 'sbo' cannot run: no shared expert")
            rank = {"device": "cuda:0", "dtype": "bfloat16"}
            ceilings = {"flops_per_s": 1e15, "bytes_per_s": 4e12, "source": "a file"}
            return {"ranks": [{**rank, "ceilings": ceilings}] * 2}
        prompts, length = request["prompts"], request["output_len"]
        by_size = {(64, 1): "prefill", (128, 257): "decode-128", (256, 257): "decode-256"}
        load = by_size.get((len(prompts) // 2, length))
        seconds = SECONDS.get(load, 0.1) + self.settings.get("enforce_eager", False)
        parts = {"seconds": {"step": 2.0, "attention": 1.0, "dispatch": 0.2, "combine": 0.2}}
        rank = {**parts, "calls": {"step": 4}, "counters": {}}
        return {
            "seconds": seconds,
            "tokens": len(prompts) * length,
            "parts": [rank, rank],
            "rss_bytes": [1 << 30] * 2,
            "phases": {},
        }


@pytest.fixture
def on_two_gpus(monkeypatch, tmp_path):
    FakeChild.open_now = FakeChild.most_open = 0
    FakeChild.started = []
    monkeypatch.setattr(engine_run, "Child", FakeChild)
    monkeypatch.setattr(engine_run, "on_gpus", lambda options: True)
    monkeypatch.setattr(engine_run, "gpu_memory_mib", lambda count: [9e4] * count)
    monkeypatch.setattr(engine, "_device_name", lambda run: "NVIDIA H200")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def options(**fields):
    settings = {**Anchors().settings, **fields.pop("settings", {})}
    given = {"model": "deepseek-v2-lite", "ranks": (2,), "repeats": 3, "anchors": ("all",)}
    return EngineOptions(settings=settings, **{**given, **fields})


def cases_of(run, name):
    report = engine.report(run, "crossdock bench engine")
    json.dumps(report.document())
    return [case for case in report.cases if case.name == name]


def test_rates_are_per_gpu_beside_what_was_asked_and_stored(on_two_gpus):
    run = engine_run.run_engines(options())
    (prefill,) = cases_of(run, "input_throughput")
    assert prefill.median == 64 * 2048 / 1.5 and prefill.n == 3
    assert (prefill.target, prefill.reached) == (86000, True)
    assert prefill.against == {"vLLM 0.25.1, stored anchor, not run here": 71500}
    few, many = cases_of(run, "output_throughput")
    assert few.median == 128 * 257 / 5 and few.target is None and len(few.against) == 1
    assert many.median == 256 * 257 / 6 and (many.target, many.reached) == (11300, False)
    (start,) = cases_of(run, "start_to_first_token")
    assert start.target == 40 and start.shape["cold"] is False
    assert cases_of(run, "device_memory")[0].median == 9e4


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_gpus_are_asked_for_nine_tenths_of_what_two_gave(on_two_gpus, ranks):
    run = engine_run.run_engines(options(repeats=1, ranks=(ranks,)))
    (prefill,), (_, many) = (cases_of(run, f"{name}_throughput") for name in ("input", "output"))
    assert (prefill.target, many.target) == (87100, 10900)
    assert not prefill.against and not many.against
    (start,) = cases_of(run, "start_to_first_token")
    assert start.target is None and not start.against


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "mixtral-8x7b"},
        {"ranks": (3,)},
        {"settings": {"routing": "zipf:1"}},
        {"settings": {"layers": 3}},
        {"settings": {"quantize": "fp8"}},
    ],
)
def test_figures_of_others_are_not_shown(on_two_gpus, changed):
    run = engine_run.run_engines(options(repeats=1, **changed))
    for case in (*cases_of(run, "input_throughput"), *cases_of(run, "output_throughput")):
        assert case.target is None and not case.against


def test_one_engine_at_a_time_the_default_again_last(on_two_gpus):
    compared = parse_compared("graphs,transport,overlap=sbo,tp")
    run = engine_run.run_engines(options(compare=compared, repeats=2))
    assert FakeChild.most_open == 1 and FakeChild.open_now == 0
    assert [s["enforce_eager"] for s in FakeChild.started if "enforce_eager" in s] == [True]
    report = engine.report(run, "crossdock bench engine")
    names = [each["variant"] for each in report.notes["engines"]]
    assert names == [
        "2 ranks, 1 thread",
        "2 ranks, 1 thread, graphs off",
        "2 ranks, 1 thread, transport collective",
        "2 ranks, 1 thread, tp 2",
        "2 ranks, 1 thread, again at the end",
    ]
    (refused,) = report.notes["refused"].items()
    assert "overlap sbo" in refused[0] and "no shared expert" in refused[1]
    assert "one after another" in report.notes["method"]
    ratios = {
        (c.shape["load"], c.shape["changed"], c.shape["to"]): c.median
        for c in cases_of(run, "throughput_ratio")
        if not c.shape["again"]
    }
    assert ratios["prefill", ("graphs", "off"), "2 ranks, 1 thread"] == pytest.approx(1.5 / 2.5)
    against_eager = "2 ranks, 1 thread, graphs off"
    assert ratios["decode-256", ("transport", "collective"), against_eager] > 1
    again = [c for c in cases_of(run, "throughput_ratio") if c.shape["again"]]
    assert [c.median for c in again] == [1.0] * 3
    targets = [c.target for c in cases_of(run, "input_throughput")]
    assert targets == [86000, None, None, None, 86000]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(report))
    shown = console.export_text().partition("ms of a step")[2]
    assert "attention" in shown and "collective" not in shown


@pytest.mark.parametrize(("changed", "starts"), [({}, 2), ({"ranks": (8,)}, 1)])
def test_a_cold_start_is_repeated_where_a_start_is_judged(
    on_two_gpus, monkeypatch, changed, starts
):
    class Compiles(FakeChild):
        def ask(self, request):
            (on_two_gpus / "kernel").mkdir(parents=True, exist_ok=True)
            return super().ask(request)

    monkeypatch.setattr(engine_run, "Child", Compiles)
    run = engine_run.run_engines(options(repeats=1, **changed))
    assert len(FakeChild.started) == starts
    assert cases_of(run, "start_to_first_token")[-1].shape["cold"] is True


def test_a_cold_start_is_told_and_followed_by_one_with_its_kernels(on_two_gpus, monkeypatch):
    class Compiles(FakeChild):
        def ask(self, request):
            on_two_gpus.mkdir(exist_ok=True)
            for number in range(5):
                (on_two_gpus / f"kernel{number}").mkdir(exist_ok=True)
            return super().ask(request)

    monkeypatch.setattr(engine_run, "Child", Compiles)
    run = engine_run.run_engines(options(repeats=1))
    cold, cached = sorted(cases_of(run, "start_to_first_token"), key=lambda c: not c.shape["cold"])
    assert cold.more["compiled_kernels"] == [5] and cold.target is None
    assert cached.more["compiled_kernels"] == [0] and cached.target == 40
    assert len(FakeChild.started) == 2


def test_compared_engines_start_once_and_the_default_again(on_two_gpus, monkeypatch):
    class Compiles(FakeChild):
        def ask(self, request):
            if self.settings is None:
                eager = request.get("enforce_eager", False)
                (on_two_gpus / f"kernel{eager}").mkdir(parents=True, exist_ok=True)
            return super().ask(request)

    monkeypatch.setattr(engine_run, "Child", Compiles)
    run = engine_run.run_engines(options(compare=parse_compared("graphs"), repeats=1))
    assert len(FakeChild.started) == 3
    starts = cases_of(run, "start_to_first_token")
    assert [c.shape["cold"] for c in starts] == [True, True, False]
    assert [c.target for c in starts] == [None, None, 40]


def test_some_of_the_loads(on_two_gpus):
    run = engine_run.run_engines(options(anchors=("decode-256", "prefill")))
    assert [load.name for load in run.prompt_tokens] == ["prefill", "decode-256"]
    with pytest.raises(ConfigError, match=r"decode-1'.*decode-128"):
        engine_run.loads_of(options(anchors=("decode-1",)))
    with pytest.raises(ConfigError, match="one number of --ranks"):
        engine_run.loads_of(options(ranks=(1, 2)))


def test_what_is_asked_for_alone_must_run(on_two_gpus):
    with pytest.raises(UserError, match="no shared expert"):
        engine_run.run_engines(options(overlap=("sbo",)))
    assert FakeChild.open_now == 0


def test_compared_settings():
    every = parse_compared("all")
    assert ("dispatch-mode", "low_latency") in every and len(every) == 9
    assert parse_compared("tp,overlap=tbo,tp") == (("tp", "2"), ("overlap", "tbo"))
    for text in ("speed", "overlap=on", "tp=3", ""):
        with pytest.raises(ConfigError, match="--compare"):
            parse_compared(text)
    of = EngineOptions("m", ranks=(2,), compare=every)
    found = variants_of(of)
    assert found[0] == Variant(2, 1) and found[-1].again and len(found) == 11
    default = engine_settings(of, found[0])
    for variant in found[1:-1]:
        settings = engine_settings(of, variant)
        differ = {k for k, v in settings.items() if default.get(k) != v}
        assert len(differ) == 1, variant
    of = options(compare=parse_compared("tp"))  # as many sequences run at once
    seqs = [engine_settings(of, v)["max_num_seqs"] for v in variants_of(of)]
    assert seqs == [256, 512, 256]
    with pytest.raises(ConfigError, match="varies one engine"):
        variants_of(EngineOptions("m", ranks=(1, 2), compare=every))
    with pytest.raises(ConfigError, match="tp = 2"):
        engine_settings(EngineOptions("m"), Variant(1, 1, changed=("tp", "2")))
