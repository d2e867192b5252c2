"""`crossdock plan` as it is typed, mistakes too."""

import io
import json
import re
import subprocess
import sys
from itertools import dropwhile, takewhile

import pytest

from crossdock.cli.main import run

SMALL = ["plan", "qwen3-30b-a3b", "--gpu", "h200", "--gpus", "8", "--isl", "1000", "--osl", "500"]


def test_a_plan_is_printed(capsys):
    assert run(SMALL) == 0
    out, err = capsys.readouterr()
    assert out.index("Recommended") < out.index("Memory of one GPU") < out.index("Commands")
    assert "median error" in out and err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(argv, columns, monkeypatch):
    """The lines that a terminal of so many columns is given, without colours."""
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", Terminal())
        assert run(argv) == 0
        return re.sub(r"\x1b\[[\d;]*m", "", sys.stdout.getvalue()).splitlines()


def test_commands_are_whole_in_a_narrow_terminal(monkeypatch):
    wide, narrow = (
        [line for line in lines if re.match("    .* --", line)]
        for lines in (on_terminal(SMALL, columns, monkeypatch) for columns in (200, 50))
    )
    assert max(map(len, wide)) > 50 and narrow == wide


def test_tables_fit_80_columns(monkeypatch):
    argv = [*SMALL, "--simulate", "poisson:5:5", "--compare", "rebalancing"]
    lines = on_terminal(argv, 80, monkeypatch)
    assert not any("…" in line for line in lines)
    _, *rows = takewhile(str.strip, dropwhile(lambda at: not at.startswith("Beside it"), lines))
    assert rows and all(row.startswith("  ") for row in rows)


def test_json_is_one_document():
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", *SMALL, "--checklist", "--explain", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    made = json.loads(done.stdout)
    assert done.returncode == 0
    assert made["recommended"]["gpus"] <= 8 and len(made["checklist"]) == 7 and made["explain"]


def test_simulation_plot_and_plan_in_one_document(tmp_path):
    path = tmp_path / "plan.svg"
    argv = ["plan", "mixtral-8x7b", "--gpu", "h100", "--gpus", "4", "--isl", "4000", "--osl", "10"]
    argv += ["--simulate", "poisson:2:20", "--plot", str(path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", *argv], capture_output=True, text=True, timeout=280
    )
    made = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert made["simulation"]["verdict"] in ("steady", "too short") and path.stat().st_size > 1000


def test_it_imports_no_torch():
    code = (
        "import sys; from crossdock.cli.main import run; "
        f"code = run({SMALL!r}); sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=280)
    assert done.returncode == 0


def test_validation_document():
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "plan", "--validate", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 0
    needed = {"name", "predicted", "published", "error", "calibration", "source"}
    assert rows and all(needed <= row.keys() for row in rows)


def test_validation_is_printed(capsys):
    assert run(["plan", "--validate"]) == 0
    assert "Median absolute error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["plan"], "which MODEL"),
        (["plan", "deepseek-v3"], "gb200-nvl72"),
        (["plan", "deepseek-v9", "--gpu", "h100"], "deepseek-v3"),
        (["plan", "deepseek-v3", "--gpu", "h101"], "h100"),
        (["plan", "deepseek-v3", "--gpu", "h100", "--osl", "9"], "--isl"),
        ([*SMALL[:4], *SMALL[6:]], "--rate"),
        ([*SMALL, "--tpot", "0"], "--tpot must be above 0"),
        ([*SMALL, "--tpot", "0.5"], "TPOT 0.5 ms is short by"),
        ([*SMALL, "--ttft", "1"], "TTFT 1.0 ms is short by"),
        ([*SMALL, "--rate", "-1"], "--rate must be above 0"),
        ([*SMALL, "--rate", "100000"], "short by"),
        ([*SMALL, "--zipf", "nan"], "--zipf"),
        ([*SMALL, "--ttft", "inf"], "--ttft must be a number up to"),
        ([*SMALL, "--plot", "plan.gif"], ".png"),
        ([*SMALL, "--kv-dtype", "int8"], "bf16 or fp8"),
        ([*SMALL, "--simulate", "poisson:fast"], "poisson:RATE"),
        ([*SMALL, "--compare", "ratio"], "--simulate"),
        ([*SMALL, "--lengths", "100"], "--explain"),
        ([*SMALL, "--explain", "--lengths", "many"], "lognormal"),
        ([*SMALL, "--fabric", "string"], "error: --fabric: outer = 'string'; expected one of"),
        (["plan", "--from", "http://127.0.0.1:1"], "does not answer"),
        (["plan", "--from", "nonsense"], "does not answer"),
    ],
)
def test_mistakes_say_what_to_change(argv, says, capsys):
    assert run(argv) == 2
    out, err = capsys.readouterr()
    assert says in err and "Traceback" not in err and out == ""
