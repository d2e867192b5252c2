"""The nvlink transport against the collective one, bit by bit: on CPUs in Triton's interpreter with
real processes, on GPUs at real sizes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from crossdock.comm import SharedMemory
from crossdock.comm.nvlink import NvlinkLayout, nvlink_bytes
from crossdock.comm.symmetric import allocate_host
from crossdock.core import CapacityError

SCRIPT = Path(__file__).with_name("nvlink_rank.py")
BASE = {
    "do": "run", "size": 2, "slots": 4, "top_k": 2, "hidden": 128, "max_tokens": 6, "seed": 1,
    "dtype": "bfloat16", "fp8": False, "per_expert": False, "pattern": "random",
    "tolerance": 0.0,
}  # fmt: skip


@pytest.fixture
def ranks(tmp_path):
    """Runs cases in `size` processes; all must end well."""
    started = []

    def run(size, cases, device="cpu", deadline=60.0, timeout=280):
        memory = SharedMemory.create(16 << 20)
        env = {**os.environ, "TRITON_INTERPRET": "1"} if device == "cpu" else dict(os.environ)
        if device == "cuda":
            env.pop("TRITON_INTERPRET", None)
        for rank in range(size):
            arguments = [rank, size, device, memory.fd, tmp_path / "store", deadline]
            command = [sys.executable, str(SCRIPT), *map(str, arguments), json.dumps(cases)]
            started.append(
                subprocess.Popen(
                    command, pass_fds=[memory.fd], env=env, stderr=subprocess.PIPE, text=True
                )
            )
        memory.close_fd()
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in started):
            late = time.monotonic() > deadline
            if late or any(process.poll() for process in started):  # the others would wait for it
                for process in started:
                    process.terminate()
                break
            time.sleep(0.05)
        said = [process.communicate(timeout=10)[1] for process in started]
        errors = [f"rank {r}:\n{text}" for r, text in enumerate(said) if text]
        assert all(process.wait(10) == 0 for process in started), "\n".join(errors) or "too late"

    yield run
    for process in started:
        process.kill()
        process.wait(10)


def test_two_ranks(ranks):
    ranks(
        2,
        [
            {**BASE, "tokens": [[3, 5], [6, 0], [0, 0], [1, 6]]},
            {**BASE, "dtype": "float32", "pattern": "holes", "top_k": 3, "tokens": [[6, 4]] * 2},
            {**BASE, "fp8": True, "hidden": 384, "tokens": [[6, 2], [1, 3]]},
            {**BASE, "per_expert": True, "pattern": "holes", "tokens": [[4, 6], [3, 0]]},
            {**BASE, "pattern": "one rank", "top_k": 16, "tokens": [[5, 6]]},
        ],
    )


def test_units_of_several_tokens(ranks):
    many = {**BASE, "max_tokens": 257, "slots": 5}
    ranks(
        3,
        [
            {**many, "size": 3, "tokens": [[17, 0, 9]]},
            {**many, "size": 3, "fp8": True, "pattern": "holes", "tokens": [[10, 3, 5]]},
            {**many, "size": 3, "per_expert": True, "top_k": 3, "tokens": [[9, 0, 2]]},
        ],
    )


def test_masked_rows_with_two_batches_in_flight(ranks):
    masked = {**BASE, "do": "masked", "tolerance": 1e-6, "dtype": "float32", "slots": 3}
    ranks(
        2,
        [
            {**masked, "tokens": [[[3, 2], [6, 0]], [[0, 0], [1, 5]], [[2, 6], [4, 4]]]},
            {**masked, "fp8": True, "hidden": 256, "tokens": [[[4, 1], [2, 6]]] * 2},
            {**masked, "per_expert": True, "pattern": "holes", "tokens": [[[4, 3], [5, 2]]] * 2},
            {**masked, "do": "soak", "dtype": "bfloat16", "rounds": 4},
            {**masked, "pattern": "one rank", "top_k": 3, "tokens": [[[6, 6], [5, 1]]]},
        ],
    )


def test_four_ranks(ranks):
    four = {**BASE, "size": 4, "slots": 2, "max_tokens": 3}
    ranks(
        4,
        [
            {**four, "tokens": [[2, 0, 3, 1]]},
            {
                **four,
                "do": "masked",
                "tolerance": 2e-2,
                "tokens": [[[1, 2, 0, 3], [2, 1, 1, 0]]] * 2,
            },
        ],
    )


def test_nobody_overtakes_a_third_rank(ranks):
    case = {**BASE, "size": 3, "dtype": "float32", "do": "lagging", "rounds": 2, "lag": 0.5}
    ranks(3, [case])


def stalled(size, hidden, deadline):
    """A rank that does not come, to either phase, its halves apart or fused."""
    case = {**BASE, "size": size, "hidden": hidden, "dtype": "float32", "do": "stalled"}
    return [
        {**case, "deadline": deadline, "stage": stage, "fused": fused}
        for stage in ("dispatch", "combine")
        for fused in (False, True)
    ]


def test_a_rank_that_does_not_come_is_named(ranks):
    ranks(3, stalled(3, 128, 0.5))


def test_what_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="multiple of 128, got 100"):
        NvlinkLayout(2, 8, 100, 2, 2)
    with pytest.raises(CapacityError, match="top_k 1 to 16, got 17"):
        NvlinkLayout(2, 8, 128, 17, 2)
    memory = SharedMemory.create(1 << 20)
    size = nvlink_bytes(8, 128, 7168, 8)
    with pytest.raises(CapacityError, match=rf"{8 * size} bytes.* {(1 << 20) - 4096} are there"):
        allocate_host(memory, 4096, size, 0, 8, lambda: None)
    memory.close_fd()


def test_low_latency_buffers_are_small():
    """Both sets: a tenth of what one row per (token, expert) takes."""
    for fp8 in (False, True):
        assert nvlink_bytes(8, 128, 7168, 8, fp8=fp8) < 200e6


DEVICES = min(8, torch.cuda.device_count())
LARGE = {**BASE, "size": DEVICES, "hidden": 7168, "slots": 256 // max(1, DEVICES), "top_k": 8}
NORMAL, LOW = {**LARGE, "max_tokens": 4096}, {**LARGE, "max_tokens": 128}
MASKED = {**LOW, "do": "masked", "tolerance": 1e-2}


def spread(*counts):
    """Tokens of each rank, the counts again and again."""
    return [counts[r % len(counts)] for r in range(DEVICES)]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
def test_normal_mode_on_gpus(ranks):
    cases = [
        {**NORMAL, "tokens": [spread(4096), spread(0, 1000), spread(7, 4095), spread(0)]},
        {**NORMAL, "fp8": True, "pattern": "holes", "tokens": [spread(4096, 4090)] * 2},
        {**NORMAL, "pattern": "one rank", "tokens": [spread(4096, 1)]},
        {**NORMAL, "max_tokens": 1024, "per_expert": True, "pattern": "holes",
         "tokens": [spread(1024, 3)] * 2},
        {**NORMAL, "hidden": 128, "top_k": 16, "slots": 5, "tokens": [spread(3000, 17)]},
        {**NORMAL, "hidden": 384, "dtype": "float32", "fp8": True, "tokens": [spread(300, 301)]},
    ]  # fmt: skip
    ranks(DEVICES, cases, device="cuda", deadline=20.0, timeout=150)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
def test_low_latency_on_gpus(ranks):
    full, few = [spread(128), spread(3, 128)], [spread(0, 1), spread(0)]
    cases = [
        {**LOW, "tokens": [spread(128), spread(1, 0), spread(0), spread(17, 128)]},
        {**MASKED, "tokens": [full, few] * 2},
        {**MASKED, "fp8": True, "tokens": [full, few] * 2},
        {**MASKED, "pattern": "one rank", "tokens": [[spread(128), spread(128, 1)]] * 2},
        {**MASKED, "pattern": "holes", "per_expert": True, "tokens": [full] * 2},
        {**MASKED, "hidden": 128, "top_k": 16, "fp8": True, "tokens": [full, few]},
        {**MASKED, "max_tokens": 256, "tokens": [[spread(256), spread(255, 1)]] * 2},
        {**LOW, "do": "graph", "rounds": 200},
    ]
    ranks(DEVICES, cases, device="cuda", deadline=20.0, timeout=150)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
def test_twenty_thousand_round_trips(ranks):
    soak = {**LOW, "do": "soak", "rounds": 10000}
    ranks(DEVICES, [soak], device="cuda", deadline=20.0, timeout=150)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
def test_a_gpu_that_does_not_come_is_named(ranks):
    ranks(DEVICES, stalled(DEVICES, 1024, 2.0), device="cuda", timeout=60)
