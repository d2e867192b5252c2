"""Seconds of an exchange over hierarchical links."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from crossdock.core import ConfigError, MoESpec
from crossdock.planner.calibration import Calibration
from crossdock.planner.cost.routing import expected_places
from crossdock.planner.hardware import Hardware, Link

Mode = Literal["normal", "low_latency"]


@dataclass(frozen=True)
class Spread:
    """Rows that one token becomes, by where they go: in expectation, on one kind of fabric.

    `staged` counts every row of the inner exchange, those to the own rank too; `inner` those that
    cross it, `outer` those that cross the network.
    """

    staged: float
    inner: float
    outer: float
    ranks: int
    nodes: int


def spread(moe: MoESpec, gpus: int, domain_size: int, mode: Mode, redundant: bool) -> Spread:
    """Normal mode sends a row once per rank, and over the network once per node, where the same
    index forwards it; low-latency mode sends one per (token, expert), straight to its rank
    (DeepEP).

    Groups of experts confine a token to few nodes only where nodes hold whole groups; where they do
    not divide, a balancer with redundant experts scatters them (EPLB's global policy).
    """
    nodes = -(-gpus // domain_size)
    if gpus == 1:
        return Spread(0.0, 0.0, 0.0, 1, 1)
    if mode == "low_latency":
        near = min(domain_size, gpus) / gpus
        k = float(moe.top_k)
        return Spread(0.0, k * (near - 1 / gpus), k * (1 - near), gpus, nodes)
    grouped = moe.num_groups % nodes == 0 or not redundant
    ranks_hit = expected_places(moe, gpus, grouped)
    nodes_hit = expected_places(moe, nodes, grouped)
    return Spread(
        staged=ranks_hit,
        inner=ranks_hit * (1 - 1 / min(domain_size, gpus)),
        outer=nodes_hit * (1 - 1 / nodes),
        ranks=gpus,
        nodes=nodes,
    )


def exchange_s(
    rows: Spread,
    hardware: Hardware,
    mode: Mode,
    row_bytes: float,
    tokens: float,
    calibration: Calibration,
    imbalance: float = 1.0,
) -> float:
    """One dispatch or combine of `tokens` per GPU, kernel time on the busiest rank.

    Both tiers work at once, so the slower one counts. `imbalance` is of ranks; normal mode lands
    network rows on every GPU of a node in turn, so nodes' unevenness counts there, smaller by the
    root of their size.
    """
    if rows.ranks == 1:
        return 0.0
    sent = row_bytes * tokens
    inner = sent * rows.inner * imbalance / hardware.inner.bytes_per_s
    latency = hardware.inner.latency_s
    if mode == "normal":
        staged = sent * rows.staged * imbalance / hardware.inner.bytes_per_s
        inner = max(inner, staged / calibration.normal_efficiency)
    else:
        latency += calibration.low_latency_inner_s
    if rows.nodes == 1:
        return inner + latency
    outer_link = outer_of(hardware)
    latency = outer_link.latency_s
    if mode == "normal":
        imbalance = 1 + (imbalance - 1) / hardware.domain_size**0.5
    else:
        latency += calibration.low_latency_outer_s
    return max(inner, sent * rows.outer * imbalance / outer_link.bytes_per_s) + latency


def outer_of(hardware: Hardware) -> Link:
    """Raises ConfigError where the description has no network."""
    if hardware.outer is None:
        raise ConfigError(
            f"{hardware.name}: the layout spans several nodes of {hardware.domain_size} GPUs, and "
            "the description has no network; add one or plan within a node"
        )
    return hardware.outer


def all_reduce_s(num_bytes: float, ranks: int, hardware: Hardware) -> float:
    """Every rank sends 2(N-1)/N of the bytes in rings, one for each GPU of a node (NCCL), so that
    each network link carries its share of them; and a latency for each level of a tree, up and
    down, which is what small messages take."""
    if ranks == 1:
        return 0.0
    rate, latency = hardware.inner.bytes_per_s, hardware.inner.latency_s
    if ranks > hardware.domain_size:
        outer = outer_of(hardware)
        rate = min(rate, hardware.domain_size * outer.bytes_per_s)
        latency = outer.latency_s
    return 2 * (ranks - 1) / ranks * num_bytes / rate + 2 * ceil(log2(ranks)) * latency
