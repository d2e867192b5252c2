"""From the totals that ranks report to sums that never fall, and expert load over a window.

Knows the names in a snapshot; not what an exposition looks like.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


class Totals:
    """Per rank and name the total since the gateway started, whatever happens to the rank.

    A rank whose numbers go backwards has started anew: what it had counted before is kept. A rank
    that is not heard of keeps its last numbers.
    """

    def __init__(self) -> None:
        self._before: dict[int, Values] = {}
        self._last: dict[int, Values] = {}

    def update(self, rank: int, values: Values) -> None:
        last = self._last.setdefault(rank, {})
        known = [name for name in values if name in last]
        if any((values[name] < last[name]).any() for name in known):
            before = self._before.setdefault(rank, {})
            for name, value in last.items():
                before[name] = before.get(name, 0) + value
            last.clear()
        last.update(values)

    def per_rank(self, name: str) -> dict[int, np.ndarray]:
        """By rank, ascending; ranks that never reported `name` are left out."""
        found = {}
        for rank in sorted(self._last):
            parts = [v[name] for v in (self._before.get(rank, {}), self._last[rank]) if name in v]
            if parts:
                found[rank] = sum(parts[1:], start=parts[0])
        return found

    def sum(self, name: str) -> np.ndarray | None:
        """Over the ranks; None where no rank has reported it."""
        parts = list(self.per_rank(name).values())
        return sum(parts[1:], start=parts[0]) if parts else None

    def names(self) -> set[str]:
        held = [*self._before.values(), *self._last.values()]
        return {name for values in held for name in values}


class LoadWindow:
    """Expert load since a window opened. It closes, and the next opens, at the first reading by
    which `tokens` were routed in every layer; until the first closes, the open one is shown.

    `shown_LE`, `shown_LR`: rows per logical expert, and per rank, of the window shown.
    """

    def __init__(self, tokens: int, top_k: int):
        self.tokens, self.closed = tokens, 0
        self._top_k = top_k
        self._start: tuple[np.ndarray, np.ndarray] | None = None
        self.filled = 0
        self.shown_LE = np.zeros((0, 0))
        self.shown_LR = np.zeros((0, 0))

    def update(self, expert_LE: np.ndarray, rank_LR: np.ndarray) -> None:
        """Takes totals that never fall."""
        if self._start is None or self._start[1].shape != rank_LR.shape:
            self._start = (np.zeros_like(expert_LE), np.zeros_like(rank_LR))
        load_LE, load_LR = expert_LE - self._start[0], rank_LR - self._start[1]
        self.filled = int(load_LE.sum(axis=1).min()) // self._top_k if load_LE.size else 0
        closes = self.filled >= self.tokens
        if closes or not self.closed:
            self.shown_LE, self.shown_LR = load_LE, load_LR
        if closes:
            self._start, self.filled = (expert_LE.copy(), rank_LR.copy()), 0
            self.closed += 1


def relative_std(load_LX: np.ndarray) -> list[float | None]:
    """Per layer the standard deviation over the mean; None for a layer without load."""
    return [float(row.std() / row.mean()) if row.any() else None for row in load_LX]


def balancedness(load_LR: np.ndarray) -> list[float | None]:
    """Per layer mean over maximum, 1 when even; None for a layer without load."""
    return [float(row.mean() / row.max()) if row.any() else None for row in load_LR]


def arrays_of(values: Mapping[str, Any], counters: Sequence[str]) -> Values:
    """The totals of a rank's snapshot as arrays under flat names; slot rows are summed per layer.
    `counters`: of its scheduler."""
    flat: dict[str, Any] = {
        **{f"seconds.{part}": v for part, v in values.get("seconds", {}).items()},
        **{f"overlap.{mode}": v for mode, v in values.get("overlap_steps", {}).items()},
        **{f"bytes.{path}": v for path, v in values.get("all_to_all_bytes", {}).items()},
    }
    work = ("timed_ns", "timed_flops", "timed_bytes")
    flat |= {name: n for name, n in values.get("counters", {}).items() if name in work}
    scheduler = values.get("scheduler", {})
    flat |= {name: scheduler[name] for name in counters if name in scheduler}
    if "step" in values.get("calls", {}):
        flat["steps"] = values["calls"]["step"]
    for name, h in values.get("histograms", {}).items():
        flat[f"counts.{name}"] = h["counts"]
        flat[f"sum.{name}"] = h["sum"]
    if "dropped_tokens" in values:
        flat["dropped_tokens"] = sum(values["dropped_tokens"])
    if "expert_tokens" in values:
        flat["expert_tokens"] = values["expert_tokens"]
    arrays = {name: np.asarray(value) for name, value in flat.items()}
    if "slot_tokens" in values:
        # A placement with other slots must not look like counts going backwards.
        arrays["slot_tokens"] = np.asarray(values["slot_tokens"]).sum(axis=-1)
    return arrays
