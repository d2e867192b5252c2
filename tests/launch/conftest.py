"""Small random checkpoints written by transformers, and running a script of steps on R ranks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossdock.comm import SharedMemory, group_bytes, shm_bytes, tensor_bytes

ROOT = Path(__file__).parents[2]
STORYTELLER = ROOT / "checkpoints" / "storyteller"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def storyteller() -> Path:
    return STORYTELLER


@pytest.fixture
def idle_ticks():
    """Of 10 ms, those that the busiest of some processes used in a second; a busy loop uses about
    a hundred. Of five seconds the first with at most `most`: where many processes share a core the
    end of a step may take its time."""

    def used(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def ticks(pids: list[int], most: int) -> int:
        for _ in range(5):
            before = [used(pid) for pid in pids]
            time.sleep(1.0)
            busiest = max(used(pid) - n for pid, n in zip(pids, before, strict=True))
            if busiest <= most:
                break
        return busiest

    return ticks


def _run_ranks(
    out: Path,
    config: dict[str, Any],
    prompts: list[list[int]],
    timeout: float = 250,
    symmetric_bytes: int = 0,
    **job: Any,
) -> list[np.ndarray]:
    """The logits [tokens, V] of every prompt, from `config["ranks"]` processes; those of a group
    have the same bits. `symmetric_bytes`: of each, for the nvlink transport in Triton's
    interpreter."""
    ranks = config["ranks"]
    nbytes = shm_bytes(ranks, 64, 64, 8, 4, bool(config.get("invariant")))
    memory = SharedMemory.create(nbytes + ranks * symmetric_bytes)
    memories = [memory]
    if config.get("tp", 1) > 1 and config.get("device", "cpu") == "cpu":
        memories.append(SharedMemory.create(group_bytes(ranks, tensor_bytes(64, 256, 4))))
        job["group_fd"] = memories[1].fd
    job = {
        "chunk": 1000, "prefill": 0, "stagger": 0, "prompts": prompts,
        "config": {"device": "cpu", "overlap": "off", **config},
        "rendezvous": str(out / f"store-{np.random.default_rng().integers(1 << 62)}"), **job,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [
                sys.executable, str(Path(__file__).with_name("rank_logits.py")), str(rank),
                str(memory.fd), json.dumps(job), str(out / f"rank{rank}.npz"),
            ],
            pass_fds=[m.fd for m in memories],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        assert [p.wait(timeout=timeout) for p in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for one in memories:
            one.close_fd()
    found: dict[int, np.ndarray] = {}
    for rank in range(ranks):
        with np.load(out / f"rank{rank}.npz") as saved:
            for key in saved.files:
                np.testing.assert_array_equal(found.setdefault(int(key), saved[key]), saved[key])
    return [found[i] for i in range(len(prompts))]


@pytest.fixture
def run_ranks(tmp_path: Path):
    def run(config: dict[str, Any], prompts: list[list[int]], **job: Any) -> list[np.ndarray]:
        return _run_ranks(tmp_path, config, prompts, **job)

    return run
