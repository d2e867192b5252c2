import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from crossdock.comm import SharedMemory
from crossdock.comm.shared import ShmLayout

SCRIPT = Path(__file__).with_name("comm_rank.py")
ANSWER_S = 250.0


class Failed(Exception):
    """What a rank process raised: type name, message, rank named."""


class Pool:
    """Persistent rank processes; worlds of several sizes among the first of them."""

    def __init__(
        self, ranks, sizes, directory, deadline_s=30.0, nbytes=8 << 20, shared=True, device="cpu"
    ):
        self.memories = {s: SharedMemory.create(nbytes) for s in sizes} if shared else {}
        groups = [
            f"{s}:{self.memories[s].fd if shared else -1}:{directory / f'store{s}'}:{deadline_s}"
            for s in sizes
        ]
        fds = [memory.fd for memory in self.memories.values()]
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = Pipe()
            command = [
                sys.executable,
                str(SCRIPT),
                str(rank),
                device,
                str(theirs.fileno()),
                *groups,
            ]
            self.processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno(), *fds], env=os.environ)
            )
            theirs.close()
            self.pipes.append(ours)

    def send(self, rank, name, *args, **kwargs):
        self.pipes[rank].send((name, args, kwargs))

    def answer(self, rank):
        if not self.pipes[rank].poll(ANSWER_S):
            raise TimeoutError(f"rank {rank} gave no answer")
        good, value = self.pipes[rank].recv()
        if not good:
            raise Failed(*value)
        return value

    def call(self, ranks, name, *args, **kwargs):
        for rank in ranks:
            self.send(rank, name, *args, **kwargs)
        return [self.answer(rank) for rank in ranks]

    def poison(self, size):
        """NaN in all buffers and no sensible flag; the ranks must be idle."""
        memory, start = self.memories[size], ShmLayout(size).flags
        memory.array(start, (memory.nbytes - start,), np.dtype(np.uint8))[:] = 0xFF

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes:
            process.wait(10)
        for memory in self.memories.values():
            memory.close_fd()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = Pool(5, (1, 2, 3, 4, 5), tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture
def make_pool(tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(Pool(*args, directory=tmp_path, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def failed():
    return Failed
