"""What ranks of an attention group exchange, between processes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.comm import SharedMemory, group_bytes, shm_bytes, tensor_bytes
from crossdock.core import share_of

SCRIPT = Path(__file__).with_name("group_rank.py")


def run(tmp_path: Path, ranks: int, tp: int, kind: str = "shm", what: str = "random") -> None:
    memories = {"shm": SharedMemory.create(shm_bytes(ranks))}
    if kind == "shm":
        nbytes = group_bytes(ranks, tensor_bytes(13, 24, 4))
        memories["group"] = SharedMemory.create(nbytes)
    fds = {name: memory.fd for name, memory in memories.items()}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(ranks), str(tp), kind, json.dumps(fds),
             str(tmp_path / "store"), what],
            pass_fds=list(fds.values()),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        assert [process.wait(timeout=280) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for memory in memories.values():
            memory.close_fd()


@pytest.mark.parametrize(("ranks", "tp", "kind"), [(4, 2, "shm"), (4, 4, "shm"), (2, 2, "gloo")])
def test_shares_and_sums(tmp_path: Path, ranks: int, tp: int, kind: str) -> None:
    run(tmp_path, ranks, tp, kind)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2)])
def test_gpus_and_a_captured_step(tmp_path: Path, ranks: int, tp: int) -> None:
    import torch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run(tmp_path, ranks, tp, "nccl")


def test_a_rank_that_stays_away_is_named(tmp_path: Path) -> None:
    run(tmp_path, 4, 2, what="absent")


def test_shares_are_all_tokens_in_order() -> None:
    draw = random.Random()
    for _ in range(200):
        tokens, size = draw.randrange(0, 40), draw.choice((1, 2, 4))
        shares = [range(tokens)[share_of(tokens, size, rank)] for rank in range(size)]
        assert [t for share in shares for t in share] == list(range(tokens))
        assert len(shares[0]) == -(-tokens // size) == max(map(len, shares))
