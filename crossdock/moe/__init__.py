"""The MoE pipeline: route -> dispatch -> permute -> experts -> unpermute -> combine.

Knows experts and placements; not which model they belong to, nor requests.
"""

from crossdock.moe.context import ExpertLoad, MoEContext, MoEWeights, RouterOptions
from crossdock.moe.experts import run_on_device
from crossdock.moe.layer import MoELayer, build_moe_layer
from crossdock.moe.router import Router, SlotMap

__all__ = [
    "ExpertLoad",
    "MoEContext",
    "MoELayer",
    "MoEWeights",
    "Router",
    "RouterOptions",
    "SlotMap",
    "build_moe_layer",
    "run_on_device",
]
