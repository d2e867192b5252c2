"""Deciding in a process of its own: a plan takes seconds of Python for large models, and the
gateway's threads have tokens to pass on. `python -m crossdock.launch.rebalance_planner PARENT`: a
question as JSON on stdin, the answer on stdout; it ends when it has another parent.
"""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, fields
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from crossdock.control import Decision, History, Proposal, Question, Window, decide
from crossdock.core import ConfigError, CrossdockError, EngineConfig, Placement, UserError

_NICE = 5
_TIMEOUT_S = 600.0
_LOOK_S = 0.2
"""How often is looked whether a plan is still wanted."""


def decide_elsewhere(question: Question, stop: threading.Event) -> Decision:
    """`control.decide`, in another process, which does not outlive `stop`.

    Raises:
        ConfigError: as there.
        CrossdockError: that process failed, or was stopped.
    """
    end, said, wrong = time.monotonic() + _TIMEOUT_S, None, ""
    with TemporaryFile("w+") as asked:  # a pipe's rest would be lost when `communicate` looks up
        asked.write(encode(question))
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "crossdock.launch.rebalance_planner", str(os.getpid())],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    with process:
        try:
            while said is None:
                if stop.is_set():
                    raise CrossdockError("the engine is closed")
                if time.monotonic() > end:
                    raise CrossdockError(f"no plan within {_TIMEOUT_S:.0f} s")
                with suppress(subprocess.TimeoutExpired):
                    said, wrong = process.communicate(timeout=_LOOK_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise CrossdockError(f"the planning process failed: {wrong[-500:].strip()}")
    answer = json.loads(said)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    plan = answer.pop("plan")
    return Decision(**answer, plan=None if plan is None else Proposal(**_arrays(plan)))


def encode(question: Question) -> str:
    return json.dumps(asdict(question), default=np.ndarray.tolist)


def decode(text: str) -> Question:
    values = json.loads(text)
    for name, cls in (
        ("window", Window), ("placement", Placement), ("config", EngineConfig),
        ("history", History),
    ):  # fmt: skip
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in values[name].items() if k in known}
        values[name] = cls(**_arrays(given))
    return Question(**values)


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
    """Lists of lists are arrays, other lists tuples."""
    return {
        k: (np.array(v) if v and isinstance(v[0], list) else tuple(v)) if isinstance(v, list) else v
        for k, v in values.items()
    }


def _end_with(parent: int) -> None:
    """An engine's end waits for no plan, and the thread that would end this process ends first."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    os.nice(_NICE)
    try:
        answer = asdict(decide(decode(sys.stdin.read())))
    except UserError as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout, default=np.ndarray.tolist)


if __name__ == "__main__":
    main()
