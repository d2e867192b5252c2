"""The commands over a real engine: a tiny checkpoint on CPU ranks."""

import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from rich.console import Console

DEMO = Path(__file__).parents[2] / "recipes" / "demo.py"
ENV = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}


def crossdock(*args, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "crossdock", *map(str, args)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=280,
        env=ENV,
    )


def sessions_of(parent):
    """Live processes started by `parent`, in whatever session they are."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def served(checkpoint):
    """A server on three ranks (which do not divide eight experts), and what it said of itself."""
    command = ["serve", str(checkpoint), "--ranks", "3", "--port", "0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "crossdock", *command, "--served-model-name", "tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=120)


def test_serve_answers_and_ctrl_c_ends_all(served):
    process, facts = served
    assert (facts["ranks"], facts["slots"], facts["served_model_name"]) == (3, 9, "tiny")
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{facts['url']}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    done = crossdock(
        "bench", "serve", "--url", facts["url"], "--concurrency", "1,3", "--input-len", "5:20",
        "--output-len", "6", "--num-prompts", "6", "--json", "--goodput", "ttft:60000", "tpot:1e-9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [p["successes"] for p in document["points"]] == [6, 6]
    assert [p["output_tokens"] for p in document["points"]] == [36, 36]
    named = [(case["name"], case["reached"]) for case in document["cases"]]
    assert named.count(("ttft", True)) == named.count(("tpot", False)) == 2
    ranks = sessions_of(process.pid)
    assert len(ranks) == 3
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == ""
    assert not any(alive(pid) for pid in ranks)
    assert "slots rounded up" in err and "KV" in err and "tokens" in err


def test_bench_serve_fails_with_its_requests(served):
    _, facts = served
    # Longer than the context. Those of the warm-up fail too, and are not counted.
    args = ("--input-len", "400", "--num-prompts", "3")
    done = crossdock("bench", "serve", "--url", facts["url"], *args)
    assert done.returncode == 1
    assert "3 requests failed" in done.stdout and "HTTP 400" in done.stdout
    done = crossdock("bench", "serve", "--url", facts["url"], *args, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["points"][0]["failures"] == 3 and "HTTP 400" in done.stderr


def test_generate(checkpoint, tmp_path):
    args = ("--max-tokens", "8", "--temperature", "0", "--device", "cpu")
    done = crossdock("generate", checkpoint, "--prompt", "hello", *args, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["prompt_tokens"] == 5 and document["finish_reason"] in ("length", "stop")
    assert 1 <= len(document["token_ids"]) <= 8
    config = tmp_path / "two.toml"
    config.write_text("ranks = 2\nmax_num_batched_tokens = 16\n")
    greedy = shutil.copytree(checkpoint, tmp_path / "greedy")
    (greedy / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.0}')
    args = ("--max-tokens", "8", "--device", "cpu")
    streamed = crossdock("generate", greedy, *args, "--config", config, stdin="hello")
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == document["text"] + "\n"


def test_generate_ends_where_nobody_reads_on():
    """As `crossdock generate ... | head -c 1` does."""
    storyteller = Path(__file__).parents[2] / "checkpoints" / "storyteller"
    process = subprocess.Popen(
        [sys.executable, "-m", "crossdock", "generate", str(storyteller), "--prompt", "Once",
         "--max-tokens", "400", "--temperature", "0", "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        process.wait(timeout=60)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_bench_engine(checkpoint, tmp_path):
    out, timeline = tmp_path / "results" / "engine.json", tmp_path / "timeline.json"
    (tmp_path / "mine.toml").write_text(
        "memory_gbytes_per_s = 10.0\n[matmul_tflop_per_s]\nfloat32 = 0.1\n"
    )
    config = tmp_path / "config.toml"
    config.write_text(f"hardware = '{tmp_path / 'mine.toml'}'\n")
    done = crossdock(
        "bench", "engine", checkpoint, "--vs", "transformers", "--ranks", "1,2", "--repeats", "2",
        "--num-prompts", "3", "--input-len", "4:9", "--output-len", "5", "--target", "1e-6",
        "--device", "cpu", "--json", "--out", out, "--config", config, "--trace", timeline,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(out.read_text())
    rates = {
        c["shape"]["variant"]: c for c in document["cases"] if c["name"] == "output_throughput"
    }
    assert rates.keys() == {"1 rank, 1 thread", "2 ranks, 1 thread", "transformers, 1 thread"}
    first = rates["1 rank, 1 thread"]
    assert first["n"] == 2 and first["median"] > 0
    assert first["against"].keys() == rates.keys() - {"1 rank, 1 thread"}
    ratios = {c["shape"]["to"]: c for c in document["cases"] if c["name"] == "throughput_ratio"}
    assert ratios["transformers, 1 thread"]["reached"] is True
    assert ratios["1 rank, 1 thread"]["target"] is None
    (step,) = [c for c in document["cases"] if c["name"] == "step" and c["shape"]["ranks"] == 2]
    assert step["parts_ms"]["attention"] > 0 and step["steps"] >= 2 * 5
    assert step["phases"]["decode"]["mbu"] > 0 and step["phases"]["prefill"]["steps"] >= 1
    exposed = [c["median"] for c in document["cases"] if c["name"] == "exposed_communication"]
    assert len(exposed) == 2 and all(0 < share < 1 for share in exposed)
    traced = json.loads(timeline.read_text())  # of the first engine
    assert traced["otherData"]["ranks"] == [0] and len(traced["otherData"]["steps"]) >= 5


def test_hardware_that_is_not_known_is_refused_before_anything_starts(checkpoint, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("hardware = 'h2000'\n")
    done = crossdock("generate", checkpoint, "--device", "cpu", "--config", config, stdin="a")
    assert done.returncode == 2 and "h2000" in done.stderr and "rank" not in done.stderr


def test_bench_comm():
    args = ("--ranks", "2", "--tokens", "0", "--repeats", "2")
    assert crossdock("bench", "comm", *args).returncode == 2
    args = ("--ranks", "2", "--tokens", "1,5", "--exchanges", "3", "--repeats", "2")
    done = crossdock("bench", "comm", *args, "--json")
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert [c["name"] for c in cases] == ["exchange", "exchange", "collective_to_shm"] * 2
    assert all(c["n"] == 2 and c["median"] > 0 for c in cases)


def test_bench_startup(checkpoint, tmp_path):
    args = ("--ranks", "2", "--repeats", "1", "--idle", "0.2", "--json")
    done = crossdock("bench", "startup", checkpoint, *args)
    assert done.returncode == 0, done.stderr
    ready, idle, memory = json.loads(done.stdout)["cases"]
    assert (ready["name"], idle["name"]) == ("start_to_ready", "idle_processor")
    assert ready["median"] > 0 and memory["n"] == 2 and memory["median"] > 10
    done = crossdock("bench", "startup", tmp_path / "none", "--repeats", "1")
    assert done.returncode == 2 and done.stderr.count("crossdock: error:") == 1
    assert "directory not found" in done.stderr


def test_demo(checkpoint):
    done = subprocess.run(
        [sys.executable, DEMO, "--once", "--model", checkpoint, "--ranks", "2", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=280,
        env=ENV,
    )
    assert done.returncode == 0, done.stderr
    for words in ("rank 0", "experts 4-7", "dispatch", "combine", "curl -N http://127.0.0.1:"):
        assert words in done.stdout
    missing = subprocess.run(
        [sys.executable, DEMO, "--once", "--model", checkpoint / "none"],
        capture_output=True,
        text=True,
        timeout=280,
        env=ENV,
    )
    assert missing.returncode == 2 and "directory not found" in missing.stderr


def test_the_demos_table_fits_80_columns():
    layers, experts, ranks = 4, 32, 4
    counts = np.random.default_rng().integers(0, 1000, (layers, experts))
    metrics = {
        "crossdock:expert_tokens_total": [
            ({"layer": str(layer), "expert": str(expert)}, float(n))
            for (layer, expert), n in np.ndenumerate(counts)
        ],
        "crossdock:rank_tokens_total": [({"rank": str(r)}, 10000.0) for r in range(ranks)],
        "crossdock:rank_busy_ratio": [({"rank": str(r)}, 0.5) for r in range(ranks)],
    }
    console = Console(file=io.StringIO(), width=80)
    console.print(runpy.run_path(str(DEMO))["load_table"](metrics, ranks))
    shown = console.file.getvalue().split()
    assert {"layer", "all", "busy", "24-31"} <= set(shown)
    assert {str(n) for n in counts.flat} <= set(shown)


def test_bench_steps(checkpoint, tmp_path):
    config = tmp_path / "small.toml"
    config.write_text("max_num_seqs = 4\nmax_num_batched_tokens = 24\nmax_model_len = 64\n")
    done = crossdock(
        "bench", "steps", checkpoint, "--measure", "overlap,mixed,layers,ranks", "--ranks", "2",
        "--repeats", "2", "--steps", "1", "--device", "cpu", "--config", config, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    cases = {(c["name"], c["shape"]["variant"]): c for c in document["cases"]}
    # A layer's time is a difference of two: where steps take microseconds it may come out as none.
    assert all(c["median"] > 0 for c in cases.values() if c["name"] in ("step_time", "mixed_step"))
    assert {"4 decodes at 64: tbo", "24 tokens of prompts: sbo"} <= {v for _, v in cases}
    moe = cases["layer_time", "4 decodes at 64: moe layer"]["parts_ms"]
    assert {"attention", "dispatch", "experts", "combine"} <= moe.keys()
    (grow,) = {c["experts_bytes_grow"] for c in cases.values() if "experts_bytes_grow" in c}
    assert 1 <= grow <= 2  # one rank holds all experts, of which 4 tokens may not use every one
    off = cases["one_rank_off_expected", "one rank, off its further bytes at copy speed"]
    assert off["experts_bytes_alone"] == pytest.approx(grow * off["experts_bytes"])
