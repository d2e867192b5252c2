"""Deciding in a process of its own: a plan takes a second of Python for large models, and the
gateway's threads have tokens to pass on. `python -m crossdock.launch.rebalance_planner`: a question
as JSON on stdin, the answer on stdout.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from crossdock.control import Decision, History, Proposal, Question, Window, decide
from crossdock.core import ConfigError, CrossdockError, EngineConfig, Placement, UserError

_NICE = 5
_TIMEOUT_S = 600.0


def decide_elsewhere(question: Question) -> Decision:
    """`control.decide`, in another process.

    Raises:
        ConfigError: as there.
        CrossdockError: that process failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "crossdock.launch.rebalance_planner"],
            input=encode(question),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise CrossdockError(f"no plan within {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise CrossdockError(f"the planning process failed: {done.stderr[-500:].strip()}")
    answer = json.loads(done.stdout)
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


def main() -> None:
    os.nice(_NICE)
    try:
        answer = asdict(decide(decode(sys.stdin.read())))
    except UserError as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout, default=np.ndarray.tolist)


if __name__ == "__main__":
    main()
