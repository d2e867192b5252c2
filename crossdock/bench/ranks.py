"""A benchmark's rank processes: one for each GPU, or in Triton's interpreter on CPUs.

All get the same request at the same time and talk among themselves while they answer it.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from crossdock.bench.child import Child
from crossdock.comm import SharedMemory, shm_bytes
from crossdock.core import ConfigError


class Ranks:
    """`settings` reach every rank, with `rank`, `ranks`, `device`, `fd` and `rendezvous`.

    Args:
        module: of the rank, run by `python -m`.
        symmetric_bytes: for each rank's symmetric buffers where they are host memory.
    """

    def __init__(
        self,
        module: str,
        count: int,
        device: str,
        settings: dict[str, Any],
        stack: ExitStack,
        symmetric_bytes: int = 0,
    ):
        memory = SharedMemory.create(shm_bytes(count) + count * symmetric_bytes)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="crossdock-"))
        variables = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
        self._children = [
            stack.enter_context(Child(module, f"rank {r}", 1, (memory.fd,), variables))
            for r in range(count)
        ]
        common = {
            **settings,
            "ranks": count,
            "device": device,
            "fd": memory.fd,
            "rendezvous": str(Path(directory) / "store"),
        }
        for rank, child in enumerate(self._children):
            child.send({**common, "rank": rank})
        self.facts = self._receive()
        memory.close_fd()

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """By rank."""
        for child in self._children:
            child.send(request)
        return self._receive()

    def _receive(self) -> list[dict[str, Any]]:
        """Of ranks that fail, the first is the cause: the others would wait for it, each until its
        deadline, and then blame it or one another."""
        pool = ThreadPoolExecutor(len(self._children))
        answers = [pool.submit(child.receive) for child in self._children]
        try:
            for answer in as_completed(answers):
                answer.result()
        except BaseException:
            for child in self._children:
                child.kill()
            raise
        finally:
            pool.shutdown()
        return [answer.result() for answer in answers]


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def choose_ranks(
    ranks: int | None, device: str | None, on_cpu: int, interpreted: bool = False
) -> tuple[int, str]:
    """`(count, "cuda" or "cpu")`: all visible GPUs unless told otherwise. `interpreted`: CPU ranks
    would have nothing but Triton's interpreter, so they have to be asked for.

    Raises:
        ConfigError: more ranks than GPUs, none, or no GPU although one was asked for.
    """
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: expected at least 1")
    if device not in (None, "auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device!r}: expected auto, cpu or cuda")
    gpus = 0 if device == "cpu" else visible_gpus()
    if interpreted and not gpus and device not in ("cpu", "cuda"):
        raise ConfigError(
            "no GPU here; on CPUs Triton's interpreter runs these kernels, for small sizes alone: "
            "give such, and --device cpu"
        )
    if device == "cpu" or (not gpus and device != "cuda"):
        return ranks or on_cpu, "cpu"
    if not gpus:
        raise ConfigError("--device cuda: no CUDA device found")
    if ranks is not None and ranks > gpus:
        raise ConfigError(f"--ranks {ranks}: expected 1 to {gpus}, one for each visible GPU")
    return ranks or gpus, "cuda"
