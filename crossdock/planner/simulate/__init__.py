"""Requests over time on a fake clock: the real scheduler, router and balance policies, with any
function of a step's load as its time (`PricedSteps`: the cost model)."""

from crossdock.planner.simulate.autoscale import (
    DayComparison,
    DayProfile,
    DayResult,
    ScalePolicy,
    compare_sizes,
    decide,
    max_rate,
    read_profile,
)
from crossdock.planner.simulate.compare import (
    Comparison,
    compare,
    overlaps,
    ratios,
    without_rebalancing,
)
from crossdock.planner.simulate.config import (
    ExpertLoads,
    KVLink,
    Pool,
    Rebalance,
    SimConfig,
    StepLoad,
    StepTime,
)
from crossdock.planner.simulate.experts import loads_from_counts, zipf_loads
from crossdock.planner.simulate.pricing import PricedSteps
from crossdock.planner.simulate.result import PoolResult, Series, SimResult, Spread
from crossdock.planner.simulate.run import simulate
from crossdock.planner.simulate.traffic import Arrival, poisson, profile_arrivals, read_trace

__all__ = [
    "Arrival",
    "Comparison",
    "DayComparison",
    "DayProfile",
    "DayResult",
    "ExpertLoads",
    "KVLink",
    "Pool",
    "PoolResult",
    "PricedSteps",
    "Rebalance",
    "ScalePolicy",
    "Series",
    "SimConfig",
    "SimResult",
    "Spread",
    "StepLoad",
    "StepTime",
    "compare",
    "compare_sizes",
    "decide",
    "loads_from_counts",
    "max_rate",
    "overlaps",
    "poisson",
    "profile_arrivals",
    "ratios",
    "read_profile",
    "read_trace",
    "simulate",
    "without_rebalancing",
    "zipf_loads",
]
