"""A benchmark's engines, each in a process of its own, so that threads and memory never mix.

Requests and answers are JSON lines over the child's stdin and stdout; what libraries print to
stdout goes to stderr.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Self

from crossdock.core import CrossdockError, UserError
from crossdock.core.env import read_env

ANSWER_S = 600.0


class Child:
    """A running `python -m MODULE`, asked one thing at a time; the first is its settings.

    `variables`: of its environment, beside ours.
    """

    def __init__(
        self,
        module: str,
        name: str,
        threads: int,
        pass_fds: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ):
        # Imports of crossdock must find this very package, installed or not.
        root = str(Path(__file__).parents[2])
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            **(variables or {}),
        }
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=pass_fds,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.receive()

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone; `receive` tells how

    def receive(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            UserError, CrossdockError: as the child did.
            CrossdockError: the child is gone, or says nothing for too long.
        """
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except Empty:
            raise CrossdockError(f"{self._name}: no answer in {ANSWER_S:.0f} s") from None
        if not line:
            raise CrossdockError(f"{self._name}: ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise (UserError if answer["user"] else CrossdockError)(answer["error"])
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def kill(self) -> None:
        """Before `close`, which then waits for nothing."""
        self._process.kill()

    def close(self) -> None:
        """The child ends itself once its input does; if it does not in time, it is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_requests(
    start: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]],
    run: Callable[[Any, dict[str, Any]], dict[str, Any]],
    stop: Callable[[Any], None],
) -> None:
    """The child's side: `start(settings)` gives `(engine, facts)`, then `run(engine, request)`
    answers each line until input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = None
    try:
        for line in sys.stdin:
            try:
                if engine is None:
                    engine, answer = start(json.loads(line))
                else:
                    answer = run(engine, json.loads(line))
            except Exception as error:
                user = isinstance(error, UserError)
                answer = {"error": f"{type(error).__name__}: {error}", "user": user}
                if user:
                    answer["error"] = str(error)
                if read_env().log_level == "debug":
                    traceback.print_exc()
            print(json.dumps(answer), file=out, flush=True)
    finally:
        if engine is not None:
            stop(engine)
