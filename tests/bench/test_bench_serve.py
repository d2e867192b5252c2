import io
import json
import math

import pytest
from rich.console import Console

from crossdock.bench.serve import ServeOptions, _arrivals, report, run_load
from crossdock.bench.serve_table import render
from crossdock.bench.workload import arrival_times, random_prompts, read_sharegpt
from crossdock.cli.main import run
from crossdock.core import ConfigError, CrossdockError


def options(fake, **changes):
    defaults = {"concurrency": (3,), "num_prompts": 12, "warmup": 2, "output_lens": ((4, 9),)}
    return ServeOptions(fake.url, **{**defaults, **changes})


def text_of(shown):
    """The lines of a terminal of 80 columns."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text().rstrip().split("\n")


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_counts_every_token(fake_server, continuous, per_chunk):
    fake_server.continuous, fake_server.tokens_per_chunk = continuous, per_chunk
    run = run_load(options(fake_server))
    (point,) = run.points
    asked = sum(body["max_tokens"] for body in fake_server.bodies[-12:])
    assert (point.result.successes, point.result.failures) == (12, 0)
    assert point.result.output_tokens == asked
    assert point.result.input_tokens == 12 * 128
    assert point.result.counts["itl"] == asked - 12


def test_concurrency_is_kept_and_warmup_left_out(fake_server):
    fake_server.together = 3
    run = run_load(options(fake_server, num_prompts=30, warmup=5))
    assert fake_server.most_open == 3
    assert len(fake_server.bodies) == 1 + 5 + 30  # the trial request of discovery
    assert run.points[0].result.successes == 30


def test_open_loop(fake_server):
    run = run_load(options(fake_server, concurrency=(), request_rate=200.0))
    assert run.points[0].result.successes == 12
    with pytest.raises(ConfigError, match="exclude"):
        run_load(options(fake_server, request_rate=1.0))


def test_sweep_gives_a_point_each_and_no_shared_prompts(fake_server):
    seen = []
    sweep = options(fake_server, concurrency=(1, 4), input_lens=((8, 8), (16, 32)), warmup=0)
    run = run_load(sweep, lambda done, total: seen.append((done, total)))
    assert [(p.point.concurrency, p.point.input_len) for p in run.points] == [
        (1, (8, 8)), (4, (8, 8)), (1, (16, 32)), (4, (16, 32)),
    ]  # fmt: skip
    assert seen == [(i + 1, 48) for i in range(48)]
    prompts = {tuple(body["prompt"]) for body in fake_server.bodies[1:]}
    assert len(prompts) == 48
    shown = text_of(render(run))
    assert [line.split()[:4] for line in shown[-4:]] == [
        ["1", "8", "12", "0"], ["4", "8", "12", "0"], ["1", "16:32", "12", "0"],
        ["4", "16:32", "12", "0"],
    ]  # fmt: skip
    assert "…" not in "".join(shown) and "TPOT" in shown[-5]


def test_progress_is_told_where_there_is_no_terminal(fake_server, capsys):
    argv = ["bench", "serve", "--url", fake_server.url, "--num-prompts", "3", "--output-len", "2"]
    assert run(argv) == 0
    assert capsys.readouterr().err.startswith("1 of 3 requests\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [("500", "HTTP 500: rank 2 is gone"), ("drop", "connection broke"), ("event", "by rank 1")],
)
def test_failures_are_counted_and_named(fake_server, how, message):
    fake_server.fail_after, fake_server.fail_with = 10, how
    run = run_load(options(fake_server, warmup=0))
    point = run.points[0]
    assert run.failures == point.result.failures == 3  # one of ten was the trial request
    assert point.result.successes == 9
    assert any(message in error for error in point.errors)


def test_report_is_the_house_document(fake_server):
    run = run_load(options(fake_server, slo={"ttft": 100.0, "tpot": 1e-12}))
    document = json.loads(json.dumps(report(run, "bench serve").document(), allow_nan=False))
    assert {"command", "date", "device", "versions", "cases"} <= document.keys()
    cases = {case["name"]: case for case in document["cases"]}
    for case in cases.values():
        assert {
            "name", "shape", "unit", "better", "median", "quartiles", "n", "against", "target",
            "reached",
        } <= case.keys()  # fmt: skip
    assert cases["ttft"]["reached"] is True and cases["ttft"]["target"] == pytest.approx(1e5)
    assert cases["tpot"]["reached"] is False
    assert cases["goodput"]["median"] == 0.0
    rate = cases["output_throughput"]
    assert rate["per_device"] == pytest.approx(rate["median"] / 4)  # /version says 4 ranks


def test_sharegpt_lengths_come_from_the_server(fake_server, tmp_path):
    entries = [
        {"conversations": [{"value": "a bb ccc"}, {"value": "x " * 5}, {"value": "more"}]},
        {"conversations": [{"value": "only one turn"}]},
        {"conversations": [{"value": "far " * 400}, {"value": "too long " * 100}]},
        {"conversations": [{"value": "one two"}, {"value": "y " * 5}]},
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    dataset = f"sharegpt:{path}"
    run = run_load(options(fake_server, dataset=dataset, num_prompts=2, warmup=0))
    assert run.points[0].result.input_tokens == 3 + 2
    assert run.points[0].result.output_tokens == 5 + 5
    with pytest.raises(ConfigError, match="2 of 3 entries fit"):
        run_load(options(fake_server, dataset=dataset, num_prompts=3, warmup=0))
    path.write_text("[1, {}]")
    with pytest.raises(ConfigError, match="no entry with two turns"):
        read_sharegpt(path, "0")


def test_no_server_and_wrong_model(fake_server):
    with pytest.raises(ConfigError, match="the server has fake"):
        run_load(options(fake_server, model="other"))
    with pytest.raises(CrossdockError, match="cannot connect"):
        run_load(ServeOptions("http://127.0.0.1:1", num_prompts=1))
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        run_load(ServeOptions("localhost:8000", num_prompts=1))


def test_chunk_without_new_tokens_is_no_arrival():
    assert _arrivals([(1.0, 1), (2.0, 1), (3.0, 4)], 4) == ((1.0, 1), (3.0, 3))
    assert _arrivals([(1.0, 0), (2.0, 0)], 5) == ((1.0, 3), (2.0, 2))
    assert _arrivals([], 0) == ()


def test_workload_is_seeded_and_in_range():
    prompts = random_prompts(200, (3, 9), (2, 4), range(50), "a")
    assert prompts == random_prompts(200, (3, 9), (2, 4), range(50), "a")
    assert prompts != random_prompts(200, (3, 9), (2, 4), range(50), "b")
    assert {len(p.token_ids) for p in prompts} == set(range(3, 10))
    assert {p.output_len for p in prompts} == {2, 3, 4}
    assert {t for p in prompts for t in p.token_ids} == set(range(50))


def test_poisson_arrivals_have_the_rate():
    times = list(arrival_times(4000, 20.0, "s"))
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=5 / math.sqrt(4000))
    assert set(arrival_times(5, math.inf, "s")) == {0.0}
