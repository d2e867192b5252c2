"""Copies chosen by quota on the device, the exchange of counts included: on CPUs in Triton's
interpreter with real processes, on GPUs also in CUDA graphs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from crossdock.comm import SharedMemory

SCRIPT = Path(__file__).with_name("quota_rank.py")
BASE = {"experts": 7, "slots": 5, "top_k": 2, "max_tokens": 6, "steps": 3}
LARGE = {"experts": 256, "slots": 260, "top_k": 8, "max_tokens": 700, "steps": 20}


@pytest.fixture
def ranks(tmp_path):
    """Runs a case in `size` processes; all must end well."""
    started = []

    def run(size, case, device="cpu", timeout=250):
        memory = SharedMemory.create(4 << 20)
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        if device == "cuda":
            env.pop("TRITON_INTERPRET")
        case = {"seed": time.time_ns() % (1 << 32), **case}
        for rank in range(size):
            arguments = [rank, size, device, memory.fd, tmp_path / "store", json.dumps(case)]
            command = [sys.executable, str(SCRIPT), *map(str, arguments)]
            started.append(
                subprocess.Popen(
                    command, pass_fds=[memory.fd], env=env, stderr=subprocess.PIPE, text=True
                )
            )
        memory.close_fd()
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in started):
            late = time.monotonic() > end
            if late or any(process.poll() for process in started):  # the others would wait for it
                for process in started:
                    process.terminate()
                break
            time.sleep(0.05)
        said = [process.communicate(timeout=10)[1] for process in started]
        good = all(process.wait(10) == 0 for process in started)
        errors = [f"rank {r}:\n{text}" for r, text in enumerate(said) if text]
        assert good, f"seed {case['seed']}\n" + ("\n".join(errors) or "too late")

    yield run
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_arrive_where_the_plan_says(ranks, size):
    ranks(size, {**BASE, "do": ["steps"]})


def test_a_rank_that_does_not_come_is_named(ranks):
    ranks(3, {**BASE, "do": ["stalled"], "deadline": 0.5})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_arrive_where_the_plan_says_on_gpus(ranks, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    slots = LARGE["slots"] // size
    ranks(size, {**LARGE, "slots": slots, "do": ["steps", "graph", "router"]}, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_that_does_not_come_is_named(ranks):
    ranks(2, {**BASE, "do": ["stalled"], "deadline": 2.0}, "cuda")
