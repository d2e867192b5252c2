"""What a step costs: shapes, links and rates in, seconds by part out.

`step_cost` prices one step of a layout; `StepModel` many of one. `expected_imbalance` says how
uneven ranks are; `speed_limit` is the published bound; `communication_table` sets EP beside TP.
"""

from crossdock.planner.cost.limits import (
    Communication,
    SpeedLimit,
    communication_table,
    speed_limit,
)
from crossdock.planner.cost.model import BYTES, StepCost, StepModel, compute_rate, step_cost
from crossdock.planner.cost.network import Spread, all_reduce_s, exchange_s, spread
from crossdock.planner.cost.routing import expected_imbalance, expected_places, zipf_loads

__all__ = [
    "BYTES",
    "Communication",
    "SpeedLimit",
    "Spread",
    "StepCost",
    "StepModel",
    "all_reduce_s",
    "communication_table",
    "compute_rate",
    "exchange_s",
    "expected_imbalance",
    "expected_places",
    "speed_limit",
    "spread",
    "step_cost",
    "zipf_loads",
]
