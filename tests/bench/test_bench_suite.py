"""`bench suite`: parts in turn, what is missing named, what was written shown."""

import json
import sys

import pytest

from crossdock.bench import suite
from crossdock.bench.case_table import render
from crossdock.bench.report import Report, case_of, write_document

CASES = (
    case_of("time", [1.0, 2.0, 3.0], "us", "lower", {"variant": "a"}, target=2.5),
    case_of("rate", [4.0], "tokens/s", "higher", {"variant": "b"}, more={"parts_ms": {"x": 1.0}}),
)


def test_a_document_is_shown_as_it_was_written(tmp_path):
    report = Report("crossdock bench x", "a device", CASES)
    write_document(report.document(), tmp_path / "x.json")
    part = suite.Part("x", (), 1.0)
    again = suite.report_of(suite.Outcome(part, 1.0, json.loads((tmp_path / "x.json").read_text())))
    assert again.cases == CASES and again.command == report.command
    render(again)


def test_parts_that_fail_or_take_too_long_are_named(tmp_path, monkeypatch):
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import sys, time\n"
        "what, out = sys.argv[4], sys.argv[sys.argv.index('--out') + 1]\n"
        "if what == 'slow': time.sleep(60)\n"
        "if what == 'bad': sys.exit('no such thing')\n"
        'open(out, \'w\').write(\'{"cases": [], "command": "c", "device": "d"}\')\n'
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec /usr/bin/env python3 {stand_in} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    parts = [
        suite.Part("good", ("good",), 1.0, "max_num_seqs = 3\n"),
        suite.Part("bad", ("bad",), 1.0),
        suite.Part("slow", ("slow",), 0.1),
    ]
    outcomes = suite.run_suite(parts, 20.0, tmp_path / "out", lambda what: None)
    found = suite.document(outcomes, "crossdock bench suite")
    assert list(found["parts"]) == ["good"]
    assert found["missing"]["bad"] == "no such thing"
    assert "did not end within" in found["missing"]["slow"]
    assert (tmp_path / "out" / "good.toml").read_text() == "max_num_seqs = 3\n"


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_gpu_parts_grow_with_the_gpus(gpus):
    parts = {part.name: part.arguments for part in suite.gpu_parts(gpus)}
    prefill = parts["engine-qwen3-30b-a3b-prefill"]
    assert prefill[prefill.index("--num-prompts") + 1] == str(64 * gpus)
    assert all(
        arguments[arguments.index("--ranks") + 1] == str(gpus) for arguments in parts.values()
    )
