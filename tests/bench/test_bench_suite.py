"""`bench suite`: parts in turn, what is missing named, what was written shown."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from crossdock.bench import suite
from crossdock.bench.case_table import render
from crossdock.bench.report import Report, case_of, write_document
from crossdock.core import ConfigError

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
    stand_in, orphan = tmp_path / "stand_in.py", tmp_path / "orphan"
    stand_in.write_text(
        "import subprocess, sys, time\n"
        "what, out = sys.argv[4], sys.argv[sys.argv.index('--out') + 1]\n"
        "if what == 'slow':\n"
        "    alone = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    open({str(orphan)!r}, 'w').write(str(alone.pid))\n"
        "    time.sleep(60)\n"
        "if what == 'bad': sys.exit('no such thing')\n"
        'open(out, \'w\').write(\'{"cases": [], "command": "c", "device": "d"}\')\n'
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(
        f'#!/bin/sh\necho "round 1" >&2\nexec /usr/bin/env python3 {stand_in} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    parts = [
        suite.Part("good", ("good",), 1.0, "max_num_seqs = 3\n"),
        suite.Part("bad", ("bad",), 1.0),
        suite.Part("slow", ("slow",), 0.01),
    ]
    running = ThreadPoolExecutor().submit(
        suite.run_suite, parts, 200.0, tmp_path / "out", lambda what: None
    )
    try:  # a rank that outlives its part keeps nobody waiting
        outcomes = running.result(timeout=60)
    finally:
        if orphan.exists():
            os.kill(int(orphan.read_text()), signal.SIGKILL)
    found = suite.document(outcomes, "crossdock bench suite")
    assert list(found["parts"]) == ["good"]
    assert found["missing"]["bad"] == "no such thing"
    assert found["missing"]["slow"] == "did not end within its 2 s; it last said: round 1"
    logs = {path.stem: path.read_text() for path in (tmp_path / "out").glob("*.log")}
    assert logs == {"bad": "round 1\nno such thing\n", "slow": "round 1\n"}
    assert (tmp_path / "out" / "good.toml").read_text() == "max_num_seqs = 3\n"


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_gpu_parts_grow_with_the_gpus(gpus):
    parts = {part.name: part.arguments for part in suite.gpu_parts(gpus)}
    assert all(
        arguments[arguments.index("--ranks") + 1] == str(gpus) for arguments in parts.values()
    )
    assert ("engine-qwen3-235b-a22b" in parts) is (gpus >= 4)
    assert ("--compare" in parts["engine-qwen3-30b-a3b"]) is (gpus < 4)
    assert "--compare" in parts["engine-deepseek-v2-lite"]
    live = parts["balance"]
    assert live[live.index("--requests") + 1] == str(128 * gpus)
    assert ("ranks" in parts["steps-qwen3-30b-a3b"][5]) is (gpus > 1)


@pytest.mark.parametrize("part", suite.gpu_parts(8), ids=lambda part: part.name)
def test_parts_are_commands_that_there_are(part, tmp_path):
    from typer.main import get_command

    from crossdock.cli.main import build_app
    from crossdock.core.config import load_toml

    command = get_command(build_app()).commands["bench"].commands[part.arguments[0]]
    command.make_context(part.arguments[0], list(part.arguments[1:]), resilient_parsing=False)
    (tmp_path / "x.toml").write_text(part.settings)
    load_toml(tmp_path / "x.toml")


def test_chosen_parts():
    parts = suite.gpu_parts(2)
    usual = [part.name for part in suite.chosen(parts, None)]
    assert usual == ["comm", "moe", "engine-deepseek-v2-lite", "engine-qwen3-30b-a3b", "balance"]
    assert [p.name for p in suite.chosen(parts, "steps-deepseek-v3,moe")] == [
        "steps-deepseek-v3",
        "moe",
    ]
    with pytest.raises(ConfigError, match=r"--parts 'engine': .*compare-qwen3-30b-a3b"):
        suite.chosen(parts, "moe,engine")
