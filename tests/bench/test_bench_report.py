import io
import json
import math

import pytest
from rich.console import Console

from crossdock.bench.case_table import render
from crossdock.bench.child import Child
from crossdock.bench.engine import EngineOptions, variants_of
from crossdock.bench.report import (
    Case,
    Report,
    case_of,
    parse_counts,
    parse_lengths,
    write_document,
)
from crossdock.core import ConfigError, CrossdockError, UserError


def test_reached():
    def case(better, target, median=5.0):
        return Case("c", {}, "ms", better, median, (4.0, 6.0), 3, target=target)

    assert case("lower", 5.0).reached is True
    assert case("lower", 4.9).reached is False
    assert case("higher", 5.1).reached is False
    assert case("higher", None).reached is None
    assert case("lower", 5.0, math.nan).reached is None


def test_document_is_json_without_nan(tmp_path):
    empty = case_of("nothing", [], "ms", "lower", {"a": (1, 2)}, more={"p99": math.nan})
    document = Report("cmd", "cpu", (empty,), {"extra": 1}).document()
    path = tmp_path / "new" / "out.json"
    write_document(document, path)
    case = json.loads(path.read_text())["cases"][0]
    assert case["median"] is None and case["p99"] is None and case["quartiles"] == [None, None]
    assert case["shape"] == {"a": [1, 2]} and "more" not in case
    with pytest.raises(ConfigError, match="--out"):
        write_document(document, tmp_path)


def test_quartiles_of_a_case():
    case = case_of("c", [4.0, 1.0, 3.0, 2.0, 5.0], "ms", "lower", {})
    assert (case.median, case.quartiles, case.n) == (3.0, (2.0, 4.0), 5)


def test_names_stay_whole_on_80_columns():
    variant = {"variant": "4 ranks, 1 thread", "to": "transformers, 1 thread"}
    cases = (
        case_of("output_throughput", [1234.5], "tokens/s", "higher", {"variant": "1 rank"}),
        case_of("throughput_ratio", [1.5], "x", "higher", variant, target=2.0),
        case_of("output_throughput", [99.0], "tokens/s", "higher", {"variant": "2 ranks"}),
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(Report("crossdock bench", "cpu", cases)))
    lines = [line.split() for line in console.export_text().split("\n")]
    at = lines.index(["output", "throughput,", "tokens/s"])
    assert lines[at + 1][:4] == ["1", "rank", "1,234", "1,234"]
    assert lines[at + 2][:3] == ["2", "ranks", "99"]
    assert lines[at + 3] == ["throughput", "ratio,", "x"]
    ratio = "4 ranks, 1 thread / transformers, 1 thread 1.5 1.5 - 1.5 1 >= 2 NO"
    assert " ".join(lines[at + 4]) == ratio


def test_lengths():
    assert parse_lengths("20:200", "--x") == ((20, 200),)
    assert parse_lengths("8,16:32", "--x") == ((8, 8), (16, 32))
    for text in ("", "0", "9:3", "1:2:3", "a", "4,"):
        with pytest.raises(ConfigError, match="--x"):
            parse_lengths(text, "--x")
    assert parse_counts("1,4", "--x") == (1, 4)
    for text in ("", "0", "1,,2", "x"):
        with pytest.raises(ConfigError, match="--x"):
            parse_counts(text, "--x")


def test_variants():
    def names(**fields):
        return [v.name for v in variants_of(EngineOptions("m", **fields))]

    assert names(ranks=(1, 4), threads=(2, 1), vs_transformers=True) == [
        "1 rank, 2 threads",
        "4 ranks, 1 thread",
        "transformers, 2 threads",
    ]
    assert names(invariant=True) == ["1 rank, 1 thread", "1 rank, 1 thread, invariant"]
    assert names(threads=(1, 2)) == ["1 rank, 1 thread", "1 rank, 2 threads"]
    assert names(ranks=(2,), overlap=("off", "auto")) == [
        "2 ranks, 1 thread, overlap off",
        "2 ranks, 1 thread",
    ]
    assert names(ranks=(2,), tp=(1, 2)) == ["2 ranks, 1 thread", "2 ranks, 1 thread, tp 2"]
    with pytest.raises(ConfigError, match="twice"):
        names(ranks=(2, 2))
    with pytest.raises(ConfigError, match="--ranks has 2 values, --threads 1 and --tp 3"):
        names(ranks=(2, 4), tp=(1, 2, 4))


CHILD = """
import sys
from crossdock.bench.child import answer_requests
from crossdock.core import ConfigError

def start(settings):
    if settings.get("bad"):
        raise ConfigError("change it")
    return [], {"pid": 1}

def run(seen, request):
    print("noise on stdout")
    if request.get("die"):
        sys.exit(3)
    seen.append(request["n"])
    return {"sum": sum(seen)}

answer_requests(start, run, lambda seen: None)
"""


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    (tmp_path / "bench_child_of_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "bench_child_of_test"


def test_child_answers_in_json_only(child_module):
    with Child(child_module, "the child", 1) as child:
        assert child.ask({}) == {"pid": 1}
        assert child.ask({"n": 2}) == {"sum": 2}
        assert child.ask({"n": 3}) == {"sum": 5}
        with pytest.raises(CrossdockError, match="KeyError"):
            child.ask({})
        assert child.ask({"n": 1}) == {"sum": 6}


def test_child_errors(child_module):
    with (
        Child(child_module, "the child", 1) as child,
        pytest.raises(UserError, match="change it"),
    ):
        child.ask({"bad": True})
    with Child(child_module, "the child", 1) as child:
        child.ask({})
        with pytest.raises(CrossdockError, match="the child: ended with exit code 3"):
            child.ask({"die": True})
