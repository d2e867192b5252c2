"""Which expert sits in which slot: pure functions over numpy arrays."""

from collections.abc import Mapping
from types import MappingProxyType

from crossdock.balance.base import Answer, Policy, Problem
from crossdock.balance.eplb import eplb
from crossdock.balance.linear import linear_placement, slots_per_rank
from crossdock.balance.llep import llep
from crossdock.balance.loads import Loads, parse_loads, read_loads
from crossdock.balance.lp import lp, split
from crossdock.balance.moves import diff, moved_experts, settle
from crossdock.balance.optimal import optimal
from crossdock.balance.quota import quota
from crossdock.balance.reroute import reroute
from crossdock.balance.score import (
    copies,
    imbalance,
    imbalance_of,
    rank_load,
    shares,
    slot_load,
)
from crossdock.balance.sticky import sticky

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "eplb": eplb,
        "quota": quota,
        "llep": llep,
        "lp": lp,
        "sticky": sticky,
        "optimal": optimal,
    }
)
"""By the name that the command line and the configuration know them by."""

__all__ = [
    "POLICIES",
    "Answer",
    "Loads",
    "Policy",
    "Problem",
    "copies",
    "diff",
    "imbalance",
    "imbalance_of",
    "linear_placement",
    "moved_experts",
    "parse_loads",
    "rank_load",
    "read_loads",
    "reroute",
    "settle",
    "shares",
    "slot_load",
    "slots_per_rank",
    "split",
]
