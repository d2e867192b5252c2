"""Steps planned one ahead, their tokens not yet known, give what steps one by one give."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossdock.comm import build_world
from crossdock.core import EngineConfig, Plan, RankLost, Request, SamplingParams, Scheduled
from crossdock.engine import Engine, build_engine, read_spec
from crossdock.engine.batch import Drawn, lay_out, make_batch
from crossdock.engine.overlap import halve
from crossdock.engine.runner import Launched
from crossdock.launch.start import find_model, resolve

STORYTELLER = str(Path(__file__).parents[2] / "checkpoints" / "storyteller")
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=9, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=1, max_tokens=11, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=0),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, stop_token_ids=(100, 200, 300)),
)


def build(store: Path, model: str, device: str, transport: str, **more: Any) -> Engine:
    torch.set_num_threads(1)
    config = EngineConfig(
        model, device=device, transport=transport, max_num_seqs=3, max_num_batched_tokens=16,
        max_model_len=96, kv_memory_gib=0.01, **more,
    )  # fmt: skip
    config = replace(config, model=str(find_model(config)))
    config = resolve(config, read_spec(config))
    world = build_world(0, 1, device, transport, {}, str(store), 60.0)
    return build_engine(config, world, lambda done, total: None)


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    engine = build(tmp_path / "store", STORYTELLER, "cpu", "local", invariant=True)
    yield engine
    engine.close()


def answers(engine: Engine, ahead: int) -> dict[str, list]:
    engine.ahead = ahead
    made: dict[str, list] = {}
    draw = np.random.default_rng(5)
    for i in range(3 * len(PARAMS)):
        prompt = tuple(int(t) for t in draw.integers(300, 4000, 3 + 5 * (i % 4)))
        engine.add(Request(str(i), prompt, PARAMS[i % len(PARAMS)], key=i))
        made[str(i)] = []
    while not (step := engine.step()).sleep:
        for output in step.outputs:
            made[output.request_id] += [*output.tokens, output.finish_reason]
    assert not engine.scheduler.has_work
    stats = engine.scheduler.stats()
    assert stats["pages_used"] == 0
    return made


def test_answers_do_not_depend_on_planning_ahead(engine):
    one_by_one = answers(engine, 0)
    assert all(made[-1] in ("length", "stop") for made in one_by_one.values())
    assert answers(engine, 1) == one_by_one


def add_and_run(engine: Engine, prompts: dict[str, tuple[int, ...]]) -> dict[str, list]:
    made: dict[str, list] = {name: [] for name in prompts}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(Request(name, prompt, PARAMS[i % 3], key=i))
    while not (step := engine.step()).sleep:
        for output in step.outputs:
            made[output.request_id] += [*output.tokens, output.finish_reason]
    assert engine.scheduler.stats()["pages_used"] == 0
    return made


@pytest.mark.parametrize("ahead", [0, 1])
def test_logits_that_are_not_finite_end_their_request_alone(engine, ahead):
    engine.ahead = ahead
    good = {"0": (300, 400, 500), "1": tuple(range(600, 620)), "2": (700,)}
    want = add_and_run(engine, good)
    engine.runner.model.embedding_VH[777] = float("nan")
    bad = {"last": (300, 400, 777), "longer": (*range(800, 822), 777), "first": (777, 300, 400)}
    bad["chunks ago"] = (400, 777, *range(800, 830))
    got = add_and_run(engine, {**good, **bad})
    assert {name: made for name, made in got.items() if name in good} == want
    assert {name: made for name, made in got.items() if name in bad} == {b: ["error"] for b in bad}
    assert add_and_run(engine, good) == want


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("model", "layers"), [("qwen3-30b-a3b", 2), ("deepseek-v2-lite", 3)])
def test_nor_do_they_disturb_others_in_graphs(tmp_path, model, layers, cache):
    engine = build(
        tmp_path / "store", model, "cuda", "nvlink", dtype="bfloat16", attention="triton",
        kv_cache_dtype=cache, load="dummy", layers=layers,
    )  # fmt: skip
    assert engine.runner.graphs is not None, engine.info["graphs"]
    engine.runner.model.embedding_VH[777] = float("nan")
    good = {"0": (300, 400, 500), "1": tuple(range(600, 620)), "2": (700,)}
    for _ in range(2):
        bad = {"alone": (777,), "longer": (*range(800, 822), 777), "first": (777, 300, 400)}
        got = add_and_run(engine, {**bad, **good, "chunks ago": (400, 777, *range(800, 830))})
        assert [got[name] for name in (*bad, "chunks ago")] == [["error"]] * 4
        assert all(got[name][-1] in ("length", "stop") for name in good)
    engine.close()


def test_an_aborted_request_disturbs_no_other(engine):
    want = answers(engine, 0)
    engine.ahead = 1
    draw = np.random.default_rng(5)
    prompts = [tuple(int(t) for t in draw.integers(300, 4000, 3 + 5 * (i % 4))) for i in range(2)]
    engine.add(Request("0", prompts[0], PARAMS[0], key=0))
    engine.add(Request("gone", prompts[1], PARAMS[4], key=1))
    made = []
    for step in range(200):
        if step == 3:
            engine.abort("gone")
        result = engine.step()
        if result.sleep:
            break
        assert step < 3 or all(output.request_id == "0" for output in result.outputs)
        for output in result.outputs:
            if output.request_id == "0":
                made += [*output.tokens, output.finish_reason]
    assert made == want["0"]


def test_tokens_being_drawn_are_filled_in_where_they_belong():
    items = []
    for i, tokens in enumerate([(-1,), (5,), (-1,), (6, 7, 8)]):
        request = Request(f"r{i}", (1, 2, 3), SamplingParams(), key=i)
        items.append(Scheduled(request, 3, tokens, (i,), sample=True))
    drawn = Drawn(torch.tensor([40, 50, 60]), {"r2": 0, "other": 1, "r0": 2})
    batch = make_batch(Plan(tuple(items)), 16, torch.device("cpu"), drawn=drawn)
    assert batch.tokens_T.tolist() == [60, 5, 40, 6, 7, 8]
    assert batch.prefill_starts_B1.tolist() == [0, 3] and batch.kv_lens_B.tolist() == [4, 4, 4, 6]
    second = halve(Plan(tuple(items)), 1, 16)[1]
    assert make_batch(second, 16, torch.device("cpu"), drawn=drawn).tokens_T[1].item() == 40
    with pytest.raises(KeyError):
        lay_out(Plan((items[0],)), 16, {"r1": 0})


def test_a_step_in_which_nothing_samples_is_waited_for_and_checked():
    seen = []

    def lost() -> None:
        seen.append("checked")
        raise RankLost("rank 1 did not come", 1)

    request = Request("r", (1, 2, 3), SamplingParams())
    plan = Plan((Scheduled(request, 0, (1, 2), (0,), sample=False),))
    launched = Launched(plan, lambda: seen.append("waited") or (), lost)
    with pytest.raises(RankLost):
        launched.read()
    assert seen == ["waited", "checked"]
    assert Launched(plan, tuple, lambda: None).read() == [None]
