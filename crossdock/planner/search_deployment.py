"""What a search finds: how many instances of which layout for both phases."""

from dataclasses import dataclass
from typing import Literal

from crossdock.planner.layout import Layout
from crossdock.planner.search_points import Point

FULL = 0.9
"""Share of its capacity that a deployment for a given rate may use: the wait in an M/D/1 queue,
load / (2 (1 - load)) services, is 4.5 services here and doubles by 0.95."""
ROOMY = 2 / 3
"""Share of the usable memory that weights may take for a layout to be preferred among equals: what
is left serves uneven batches, longer prompts and cached prefixes."""


@dataclass(frozen=True)
class Side:
    """One role of a deployment. `load`: used share of its capacity at the rate that is carried;
    `most`: its batch per GPU at full load; `bound`: what keeps the batch from being larger."""

    point: Point
    instances: int
    load: float
    bound: str
    most: float

    @property
    def gpus(self) -> int:
        return self.instances * self.point.layout.gpus


@dataclass(frozen=True)
class Deployment:
    """Prefill and decode on instances of their own ("split") or on the same ones ("together").

    `capacity` and `rate` in requests per second, over all of it; `rate` is what is given as
    throughput: never above capacity, and at most `FULL` of it where a rate was asked for.
    """

    kind: Literal["split", "together"]
    prefill: Side
    decode: Side
    gpus: int
    capacity: float
    rate: float
    ttft_s: float
    tpot_s: float
    overloaded: bool = False
    """The rate that was asked for is beyond `FULL` of the capacity; `rate` is that limit."""

    @property
    def experts(self) -> Literal["ep", "tp"]:
        layouts = (self.prefill.point.layout, self.decode.point.layout)
        return "tp" if any(layout.experts == "tp" for layout in layouts) else "ep"

    @property
    def roomy(self) -> bool:
        sides = (self.prefill, self.decode)
        return all(side.point.fit.weights_share <= ROOMY for side in sides)


def name_of(layout: Layout) -> str:
    """EP32, EP16 x TP2 (attention in groups of two) or TP16 (experts too)."""
    if layout.experts == "tp":
        return f"TP{layout.tp}"
    return f"EP{layout.gpus}" + (f" x TP{layout.tp}" if layout.tp > 1 else "")
