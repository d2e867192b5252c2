"""The timed parts of a step, in all and by layer. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Interval = tuple[str, float, float]
"""Part, start and end in seconds."""


def totals(intervals: Sequence[Interval]) -> dict[str, float]:
    """Seconds by part, and "step", from the first beginning to the last end."""
    found: dict[str, float] = defaultdict(float)
    for part, start, end in intervals:
        found[part] += end - start
    found["step"] = max(end for *_, end in intervals) - min(start for _, start, _ in intervals)
    return dict(found)


def by_layer(
    intervals: Sequence[Interval], layers: int, moe_layers: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Mean ms of a layer by kind, "dense" and "moe": "layer", from the beginning of its attention
    to that of the next one's, and what it has of each part. Empty where parts of layers are mixed,
    as those of two halves are."""
    starts = [start for part, start, _ in intervals if part == "attention"]
    if len(starts) != layers:
        return {}
    last = max(end for part, _, end in intervals if part != "sample")
    bounds = [*starts, last]
    sums: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = defaultdict(int)
    for layer in range(layers):
        kind = "moe" if layer in moe_layers else "dense"
        here = sums.setdefault(kind, defaultdict(float))
        counts[kind] += 1
        here["layer"] += bounds[layer + 1] - bounds[layer]
        for part, start, end in intervals:
            if part != "sample" and bounds[layer] <= start < bounds[layer + 1]:
                here[part] += end - start
    return {
        kind: {part: 1e3 * seconds / counts[kind] for part, seconds in parts.items()}
        for kind, parts in sums.items()
    }
