import json
import os
import socket
import subprocess
import sys

import pytest


def crossdock(*args, stdin=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "crossdock", *map(str, args)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=280,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **env},
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from crossdock.cli.main import run; assert run(['--help']) == 0; "
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'huggingface_hub'}; "
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for command in ("serve", "generate", "check", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("command", "most"),
    [(["serve"], 14), (["generate"], 14), (["bench", "engine"], 23), (["bench", "serve"], 14)],
)
def test_few_flags(command, most):
    from typer.main import get_command

    from crossdock.cli.main import build_app

    node = get_command(build_app())
    for name in command:
        node = node.commands[name]
    flags = [p.name for p in node.params if p.param_type_name == "option"]
    assert len(flags) <= most, flags
    assert "json" in flags


def fails(done, code, *words):
    """The error is one line for people; a traceback is none."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("crossdock: error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_bad_flags_are_the_users_mistake():
    fails(crossdock("serve", "m", "--rank", "4"), 2, "--rank", "serve --help")
    fails(crossdock("serve"), 2, "MODEL", "Missing")
    fails(crossdock("serve", "m", "--port", "many"), 2, "--port", "integer")
    fails(crossdock("nonsense"), 2, "nonsense")
    fails(crossdock("serve", "m", "--ranks", "0"), 2, "ranks must be at least 1, got 0")
    fails(crossdock("serve", "m", "--device", "gpu"), 2, "device must be one of auto, cpu", "'gpu'")


def test_help_and_version():
    nothing = crossdock()
    assert nothing.returncode == 2 and nothing.stdout == ""
    assert nothing.stderr.startswith("Usage: crossdock")
    from crossdock import __version__

    assert crossdock("--version").stdout == f"crossdock {__version__}\n"
    # What is derived is told as the default, in brackets.
    assert "Expert-parallel ranks. [default: 1]" in crossdock("serve", "--help").stdout


def test_bad_settings_name_file_line_and_key(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("ranks = 2\n\nmax_num_seq = 3\n")
    fails(crossdock("serve", "m", "--config", path), 2, f"{path}:3: max_num_seq: unknown")
    path.write_text("ranks = 2\nthreads = 'two'\n")
    fails(crossdock("generate", "m", "--prompt", "a", "--config", path), 2, ":2: threads", "'two'")
    path.write_text("ranks = 2\nthreads = 0\n")
    fails(crossdock("serve", "m", "--config", path), 2, ":2: threads", "at least 1")
    path.write_text("ranks = \n")
    fails(crossdock("serve", "m", "--config", path), 2, str(path), "line 1")
    fails(crossdock("serve", "m", "--config", tmp_path / "none.toml"), 2, "none.toml")


def test_flags_win_over_the_file(tmp_path):
    from crossdock.cli.settings import gather

    path = tmp_path / "engine.toml"
    path.write_text("ranks = 2\nthreads = 3\nport = 9\napi_key = 'file'\n")
    engine, server = gather(path, model="m", ranks=4, port=None, api_key=None)
    assert (engine.ranks, engine.threads) == (4, 3)
    assert (server.port, server.api_key) == (9, "file")


def test_api_key_from_the_environment(monkeypatch):
    from crossdock.cli.settings import gather

    monkeypatch.setenv("CROSSDOCK_API_KEY", "secret")
    assert gather(None, model="m")[1].api_key == "secret"
    assert gather(None, model="m", api_key="flag")[1].api_key == "flag"


def test_unknown_model_directory(tmp_path):
    missing = tmp_path / "nowhere"
    fails(crossdock("generate", missing, "--prompt", "a"), 2, str(missing))
    done = crossdock("generate", missing, "--prompt", "a", "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["error"]["exit_code"] == 2 and str(missing) in document["error"]["message"]


def test_debug_level_shows_where():
    done = crossdock("serve", "m", "--ranks", "0", CROSSDOCK_LOG_LEVEL="debug")
    assert done.returncode == 2 and "Traceback" in done.stderr
    fails(crossdock("check", CROSSDOCK_LOG_LEVEL="loud"), 2, "CROSSDOCK_LOG_LEVEL", "loud")


def test_port_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fails(crossdock("serve", tmp_path, "--port", port), 2, f"127.0.0.1:{port}")


def test_json_stays_pure_when_a_library_prints():
    code = (
        "import os; from crossdock.cli import output; o = output.open_output(['check', '--json']); "
        "print('noise'); os.system('echo more noise'); os.write(1, b'raw noise'); "
        "o.result({'a': 1})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert json.loads(done.stdout) == {"a": 1}
    assert {"noise", "more noise"} <= set(done.stderr.split("\n"))


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "x.json"
    done = crossdock("bench", "plan", "--seconds", "1e9", "--out", str(out))
    fails(done, 2, "--out", "cannot be written")
    there = tmp_path / "new" / "x.json"
    fails(crossdock("bench", "comm", "--ranks", "0", "--out", str(there)), 2)
    assert not there.exists()


def _numbers():
    """(words of a command, flag, its type) of all that are numbers."""
    from typing import get_args, get_type_hints

    from typer.main import get_command

    from crossdock.cli.main import build_app

    nodes = [((), get_command(build_app()))]
    for words, node in nodes:  # grows
        nodes += [((*words, name), n) for name, n in getattr(node, "commands", {}).items()]
        hints = get_type_hints(node.callback) if node.callback else {}
        for param in node.params:
            kinds = {hints.get(param.name), *get_args(hints.get(param.name))}
            for kind in {int, float} & kinds:
                yield words, param.opts[0], kind


NEEDED = {
    ("serve",): ["absent"],
    ("generate",): ["absent"],
    ("balance",): ["--record", "http://127.0.0.1:1"],
    ("bench", "engine"): ["absent"],
    ("bench", "quant"): ["absent", "--text", "absent"],
    ("bench", "soak"): ["absent"],
    ("bench", "startup"): ["absent"],
    ("bench", "steps"): ["absent"],
}


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e30", "1" + "0" * 400])
def test_no_flag_takes_what_is_no_number_of_anything(value, capsys):
    from crossdock.cli.main import run

    flags = list(_numbers())
    assert len(flags) > 60 and {kind for _, _, kind in flags} == {int, float}
    free = {"--seed"} | (set() if value in ("nan", "-inf") else {"--request-rate"})
    for words, flag, kind in flags:
        if flag in free or (kind is int and not value.isdecimal()):
            continue
        assert run([*words, *NEEDED.get(words, ()), flag, value]) == 2, (words, flag)
        assert flag in capsys.readouterr().err, (words, flag)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["balance", "--record", "http://127.0.0.1:1", "--seconds", "0"], "--seconds 0"),
        (["balance", "--record", "http://127.0.0.1:1", "--seconds", "-1"], "--seconds -1"),
        (["balance", "--record", "http://127.0.0.1:1", "--windows", "0"], "--windows 0"),
        (["bench", "plan", "--rate", "-1"], "--rate -1"),
        (["bench", "plan", "--seconds", "0"], "--seconds 0"),
        (["bench", "plan", "--target", "-1"], "--target"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate"),
        (["bench", "serve", "--num-prompts", "1000001"], "--num-prompts"),
        (["bench", "comm", "--target", "-1"], "--target"),
        (["bench", "soak", "absent", "--minutes", "0"], "--minutes"),
        (["bench", "startup", "absent", "--idle", "-1"], "--idle"),
        (["generate", "absent", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["plan", "deepseek-v3", "--gpus", "1000001"], "--gpus"),
        (["serve", "absent", "--ranks", "1025"], "ranks must be at most 1024"),
        (["serve", "absent", "--port", "65536"], "port"),
    ],
)  # fmt: skip
def test_numbers_out_of_range(argv, said, capsys):
    from crossdock.cli.main import run

    assert run(argv) == 2
    assert said in capsys.readouterr().err


def test_bench_serve_flags():
    fails(crossdock("bench", "serve", "--goodput", "speed:3"), 2, "ttft:500")
    fails(crossdock("bench", "serve", "tpot:3"), 2, "tpot:3")
    fails(crossdock("bench", "serve", "--concurrency", "0"), 2, "--concurrency")
    fails(crossdock("bench", "serve", "--input-len", "9:3"), 2, "--input-len")
    fails(crossdock("bench", "serve", "--url", "http://127.0.0.1:1"), 1, "127.0.0.1:1")
    both = ("--concurrency", "2", "--request-rate", "3")
    fails(crossdock("bench", "serve", *both), 2, "exclude")


def test_bench_engine_flags(tmp_path):
    fails(crossdock("bench", "engine", tmp_path, "--vs", "vllm"), 2, "transformers")
    both = ("--ranks", "1,2", "--threads", "1,2,4")
    fails(crossdock("bench", "engine", tmp_path, *both), 2, "--ranks has 2")
    fails(crossdock("bench", "engine", tmp_path, "--compare", "speed"), 2, "overlap=off|sbo|tbo")
    both = ("--anchors", "all", "--output-len", "3")
    fails(crossdock("bench", "engine", tmp_path, *both), 2, "leave out --output-len")
    fails(crossdock("bench", "steps", tmp_path, "--measure", "speed"), 2, "mixed")
    fails(crossdock("bench", "suite", "--parts", "speed", "--device", "cpu"), 2, "comm")
