"""What became of rebalances, counted in the gateway."""

from dataclasses import dataclass, field

from crossdock.metrics.recorder import Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass
class Rebalances:
    """`threshold`: imbalance from which one is thought of. Gains are of balancedness, after over
    before, less 1: what the last placement moved to promised, and what the first window with it
    showed; None before there was one."""

    threshold: float
    results: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("moved", "unchanged", "failed"), 0)
    )
    seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    moved_bytes: int = 0
    predicted_gain: float | None = None
    measured_gain: float | None = None
