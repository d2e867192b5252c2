"""What is simulated: traffic, pools of instances, and the borders to cost and balance."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crossdock.balance import Policy
from crossdock.core import ConfigError
from crossdock.planner.layout import Layout
from crossdock.planner.simulate.traffic import Arrival


@dataclass(frozen=True, eq=False)
class StepLoad:
    """What one lockstep step asks of the G attention groups of an instance.

    decodes_G: sequences with one token. kv_G: cached tokens that these read. prefill_G: tokens of
    longer chunks. pairs_G: query-key pairs of these. total_tokens: of all groups. imbalance: expert
    rows of the fullest rank over the mean, averaged over the MoE layers; 1 where loads are not
    simulated.
    """

    decodes_G: np.ndarray
    kv_G: np.ndarray
    prefill_G: np.ndarray
    pairs_G: np.ndarray
    total_tokens: int
    imbalance: float

    @property
    def tokens_G(self) -> np.ndarray:
        return self.decodes_G + self.prefill_G


StepTime = Callable[[Layout, StepLoad], float]
"""Seconds of a step, equal for all ranks of the instance."""


@dataclass(frozen=True)
class Pool:
    """Instances of one role, all alike. `kv_tokens`, `max_num_seqs`, `max_num_batched_tokens`: of
    one attention group, as the scheduler takes them."""

    layout: Layout
    kv_tokens: int
    instances: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 64

    def __post_init__(self) -> None:
        least = {
            "instances": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "page_size": 1,
            "kv_tokens": self.page_size,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")

    @property
    def gpus(self) -> int:
        return self.instances * self.layout.gpus


@dataclass(frozen=True)
class KVLink:
    """How a finished prefill's KV reaches its decode group. Each sending group has one link of
    `bytes_per_s` (of all its ranks), and its transfers queue there."""

    bytes_per_token: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Rebalance:
    """Every `interval_s` the real policy places the experts for the loads seen since the last time.
    The new placement holds once its moves are done, `bytes_per_s` into each rank, while serving
    goes on."""

    policy: Policy
    interval_s: float
    expert_bytes: int
    bytes_per_s: float
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("interval_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """inclusion_WLE: how probable it is that a token chooses expert e of layer l (sums to top-k
    over E), in windows of `window_s`; the last one holds on."""

    inclusion_WLE: np.ndarray
    window_s: float = float("inf")


@dataclass(frozen=True, eq=False)
class SimConfig:
    """`pools`: one of role "both", or one "prefill" and one "decode" (then with `kv_link`).

    `stand_for`: groups that one simulated group stands for; one in `stand_for` arrivals, drawn at
    random, is simulated. What the other groups do in a step is taken from what the simulated ones
    did in the `stand_for` steps before, so a run should be many times that long; steps come out up
    to 10% too long where few of them hold a prompt.
    `warmup_s`: requests that arrive earlier are not in the statistics (None: a tenth of the time).
    Limits in seconds, for goodput.
    """

    arrivals: tuple[Arrival, ...]
    pools: tuple[Pool, ...]
    step_time: StepTime
    kv_link: KVLink | None = None
    experts: ExpertLoads | None = None
    rebalance: Rebalance | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    warmup_s: float | None = None
    stand_for: int = 1
    series_points: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        roles = tuple(pool.layout.role for pool in self.pools)
        if roles not in (("both",), ("prefill", "decode")):
            raise ConfigError(f"pools of roles {roles}: expected both, or prefill and decode")
        if (self.kv_link is None) != (roles == ("both",)):
            raise ConfigError("kv_link belongs to a prefill and a decode pool, and only to them")
        if self.rebalance is not None and self.experts is None:
            raise ConfigError("rebalance needs experts, the loads to balance")
        if not self.arrivals:
            raise ConfigError("no arrivals: a longer trace or time, or a higher rate")
        for pool in self.pools:
            if self.stand_for < 1 or pool.layout.dp % self.stand_for:
                raise ConfigError(
                    f"stand_for {self.stand_for} does not divide the {pool.layout.dp} attention "
                    f"groups of the {pool.layout.role} layout"
                )
