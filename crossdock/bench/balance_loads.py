"""Loads that change: drifting ones, and a model's own routing, recorded."""

import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crossdock.core import SamplingParams

if TYPE_CHECKING:
    from crossdock.launch import LLM

SPREAD = 1.2
"""Standard deviation of the log loads: the heaviest of 256 has some 25 times the median."""
RECORD_WINDOWS = 6
PROMPTS = 12
PROMPT_CHARS = 600
OPENINGS = (
    "Once upon a time there was a miller who had three daughters.",
    "The old king called his servants and said to them:",
    "In the middle of the dark forest stood a little house.",
    "The princess looked out of the window and saw a ship.",
    "A poor boy walked along the road to the great city.",
    "The fox and the hen met at the well one morning.",
)


def drifting_loads(
    num_layers: int, num_experts: int, windows: int, drift: float, rows: int, seed: int = 33
) -> list[np.ndarray]:
    """`load_LE` of each window: log-normal popularities, each window's log a step of standard
    deviation `drift` from the last, their spread kept; `rows` drawn from them in each layer."""
    rng = np.random.default_rng(seed)
    keep = np.sqrt(1 - (drift / SPREAD) ** 2)
    log_LE = rng.normal(0.0, SPREAD, (num_layers, num_experts))
    loads = []
    for _ in range(windows):
        part_LE = np.exp(log_LE)
        part_LE /= part_LE.sum(axis=1, keepdims=True)
        loads.append(rng.multinomial(rows, part_LE))
        log_LE = keep * log_LE + drift * rng.normal(size=log_LE.shape)
    return loads


def record(model: str) -> dict[str, list[np.ndarray]]:
    """`load_LE` by window and kind of prompt, counted by the router of one CPU rank: stories that
    the model writes on, source code and random digits that it reads; and all of it in turns."""
    from crossdock.launch import LLM  # needs torch, which other loads do not

    rng = random.Random(33)
    kinds: dict[str, list[np.ndarray]] = {"stories": [], "code": [], "digits": []}
    with LLM(model, ranks=1, device="cpu", prefix_caching=False) as llm:
        before_LE = _expert_tokens(llm)
        for window in range(RECORD_WINDOWS):
            for kind, loads in kinds.items():
                writes = kind == "stories"
                params = SamplingParams(
                    temperature=1.0,
                    max_tokens=160 if writes else 1,
                    ignore_eos=True,
                    seed=window,
                )
                llm.generate(_prompts(kind, rng), params)
                after_LE = _expert_tokens(llm)
                loads.append(after_LE - before_LE)
                before_LE = after_LE
    turns = [loads[i] for i in range(RECORD_WINDOWS) for loads in kinds.values()]
    return {**kinds, "turns": turns}


def _expert_tokens(llm: "LLM") -> np.ndarray:
    (rank,) = llm.client.snapshots(timeout=10.0)
    return np.array(rank.values["expert_tokens"], dtype=np.int64)


def _prompts(kind: str, rng: random.Random) -> Sequence[str]:
    if kind == "stories":
        return [" ".join(rng.sample(OPENINGS, 3)) for _ in range(PROMPTS)]
    if kind == "code":
        source = Path(string.__file__).with_name("argparse.py").read_text(encoding="utf-8")
        starts = [rng.randrange(len(source) - PROMPT_CHARS) for _ in range(PROMPTS)]
        return [source[start : start + PROMPT_CHARS] for start in starts]
    return [
        " ".join(str(rng.randrange(10**6)) for _ in range(PROMPT_CHARS // 7))
        for _ in range(PROMPTS)
    ]
