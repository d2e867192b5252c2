"""What was routed, and how long steps took, between two readings of the ranks' totals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossdock.core.messages import Snapshot


@dataclass(frozen=True, eq=False)
class Reading:
    """Totals of all ranks at one time.

    expert_LE: tokens routed to each logical expert. rank_LR: rows that each rank's slots worked on.
    sizes_N: steps by the tokens of all ranks in them, up to 2**n in the nth. step_s_R, expert_s_R:
    seconds in steps and in experts; on GPUs worked out from those steps that were timed.
    """

    time: float
    expert_LE: np.ndarray
    rank_LR: np.ndarray
    steps: int
    step_s_R: np.ndarray
    expert_s_R: np.ndarray
    sizes_N: tuple[int, ...] = ()

    @classmethod
    def of(cls, time: float, snapshots: Sequence[Snapshot]) -> "Reading":
        """`snapshots`: of all ranks, in their order."""
        values = [snapshot.values for snapshot in snapshots]
        return cls(
            time,
            np.array([v["expert_tokens"] for v in values], dtype=np.int64).sum(axis=0),
            np.stack([np.array(v["slot_tokens"]).sum(axis=-1) for v in values], axis=1),
            max(_steps(v) for v in values),
            _seconds(values, "step"),
            _seconds(values, "experts"),
            tuple(values[0].get("histograms", {}).get("iteration_tokens", {}).get("counts", ())),
        )


@dataclass(frozen=True, eq=False)
class Window:
    """The difference of two readings: `seconds` long, of which `step_s` in the longest rank's
    steps, of which the part `expert_share` in experts. sizes_N: as `Reading` has them."""

    load_LE: np.ndarray
    rank_LR: np.ndarray
    steps: int
    seconds: float
    step_s: float
    expert_share: float
    sizes_N: tuple[int, ...] = ()

    @classmethod
    def between(cls, first: Reading, last: Reading) -> "Window":
        step_s = float((last.step_s_R - first.step_s_R).max())
        expert_s = float((last.expert_s_R - first.expert_s_R).max())
        return cls(
            last.expert_LE - first.expert_LE,
            last.rank_LR - first.rank_LR,
            last.steps - first.steps,
            last.time - first.time,
            step_s,
            min(1.0, expert_s / step_s) if step_s > 0 else 0.0,
            tuple(b - a for a, b in zip(first.sizes_N, last.sizes_N, strict=False)),
        )

    @property
    def sizes(self) -> tuple[tuple[int, float], ...]:
        """(steps, part of the window's tokens) by how many tokens a step has."""
        # Steps of one bucket are taken to have its upper bound, a power of two.
        tokens_N = [count << i for i, count in enumerate(self.sizes_N)]
        total = sum(tokens_N)
        if not total:
            return ((max(1, self.steps), 1.0),)
        return tuple((n, t / total) for n, t in zip(self.sizes_N, tokens_N, strict=True) if n)

    @property
    def balancedness(self) -> float | None:
        """What experts take where ranks are even, over what they took: the mean load of a rank over
        the fullest one's, loads added up over layers. None without load."""
        fullest = self.rank_LR.max(axis=1).sum()
        return float(self.rank_LR.mean(axis=1).sum() / fullest) if fullest else None


def _steps(values: dict[str, Any]) -> int:
    """All, timed or not; of a CPU rank also those in which nothing ran."""
    return max(values["calls"].get("step", 0), values.get("counters", {}).get("steps", 0))


def _seconds(values: Sequence[dict[str, Any]], part: str) -> np.ndarray:
    return np.array(
        [
            v["seconds"].get(part, 0.0) * _steps(v) / max(1, v["calls"].get("step", 0))
            for v in values
        ]
    )
