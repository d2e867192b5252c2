"""A day of changing load: what a fixed EP size costs against sizes that follow the load.

A day has too many steps to simulate each. Here requests are a stream and an instance is a server of
its size's capacity (`max_rate` finds it with `simulate`); the policy that changes sizes is stepped
through the day as it would be in service.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from crossdock.core import ConfigError
from crossdock.planner.simulate.config import SimConfig
from crossdock.planner.simulate.result import SimResult
from crossdock.planner.simulate.run import simulate


@dataclass(frozen=True)
class ScalePolicy:
    """One size up if more than `up_queue_s` of work waits or the load is above `up_load` of the
    capacity; else one down if the load is below `down_load` of the smaller size's. `cooldown_s`
    between changes; a change takes `change_s`, during which the old size serves and the larger one
    is paid for."""

    up_queue_s: float = 1.0
    up_load: float = 0.85
    down_load: float = 0.7
    cooldown_s: float = 600.0
    change_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.down_load < self.up_load <= 1:
            raise ConfigError(
                f"down_load {self.down_load} and up_load {self.up_load}: expected "
                "0 < down_load < up_load <= 1, or sizes go up and down without end"
            )
        for name in ("up_queue_s", "cooldown_s", "change_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class DayProfile:
    """Requests per second, each for `slot_s`. `min_gpus`, `max_gpus`: None for any size."""

    requests_per_s: tuple[float, ...]
    slot_s: float
    policy: ScalePolicy = ScalePolicy()
    min_gpus: int | None = None
    max_gpus: int | None = None
    wait_limit_s: float = 1.0


def read_profile(path: Path) -> DayProfile:
    """TOML: `requests_per_s`, a list, and what differs of `slot_s` (by default so that they make 24
    hours), `min_gpus`, `max_gpus`, `wait_limit_s` and a table `policy` of `ScalePolicy`'s fields.

    Raises:
        ConfigError: names the file and what is wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    rates, policy = values.pop("requests_per_s", None), values.pop("policy", {})
    if not isinstance(rates, list) or not rates or not all(_number(r) and r >= 0 for r in rates):
        raise ConfigError(f"{path}: requests_per_s: expected a list of numbers from 0")
    known = {f.name for f in fields(DayProfile)} - {"policy", "requests_per_s"}
    _check(path, values, known)
    if not isinstance(policy, dict):
        raise ConfigError(f"{path}: policy: expected a table")
    _check(path, policy, {f.name for f in fields(ScalePolicy)})
    values.setdefault("slot_s", 24 * 3600 / len(rates))
    return DayProfile(tuple(map(float, rates)), policy=ScalePolicy(**policy), **values)


def _check(path: Path, values: Mapping[str, Any], known: set[str]) -> None:
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: {key}: unknown; known keys: {', '.join(sorted(known))}")
        if not _number(value) or value < 0 or (key.endswith("gpus") and not isinstance(value, int)):
            raise ConfigError(f"{path}: {key}: expected a number from 0, got {value!r}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def decide(
    policy: ScalePolicy,
    capacities: Sequence[float],
    index: int,
    rate: float,
    queue: float,
    since_change_s: float,
) -> int:
    """The index of the size to run, given the one that runs.

    Args:
        capacities: requests per second by size, ascending.
        rate: arriving per second, lately.
        queue: requests waiting.
    """
    if since_change_s < policy.cooldown_s:
        return index
    capacity = capacities[index]
    waiting = queue > policy.up_queue_s * capacity
    if waiting or rate > policy.up_load * capacity:
        return min(index + 1, len(capacities) - 1)
    if index and rate < policy.down_load * capacities[index - 1]:
        return index - 1
    return index


@dataclass(frozen=True)
class DayResult:
    """wait_s: a request's before its service begins. late: share of requests that waited longer
    than the limit. sizes: GPUs at each point of `time_s`."""

    gpu_hours: float
    cost: float | None
    changes: int
    mean_wait_s: float
    p99_wait_s: float
    late: float
    unserved: float
    time_s: tuple[float, ...]
    sizes: tuple[int, ...]
    queue: tuple[float, ...]


@dataclass(frozen=True)
class DayComparison:
    """`saved`: share of the fixed size's GPU hours that following the load does without."""

    fixed: DayResult
    following: DayResult

    @property
    def saved(self) -> float:
        return 1 - self.following.gpu_hours / self.fixed.gpu_hours

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "saved": self.saved}


def compare_sizes(
    profile: DayProfile,
    capacity_of: Mapping[int, float],
    *,
    price_per_gpu_hour: float | None = None,
    tick_s: float = 5.0,
    seed: int = 0,
) -> DayComparison:
    """The smallest fixed size that keeps `up_load` at the peak, against sizes that follow the load.

    Args:
        capacity_of: requests per second by GPUs.

    Raises:
        ConfigError: capacities that do not rise with the size, or fall short of the peak.
    """
    policy, rates = profile.policy, profile.requests_per_s
    low, high = profile.min_gpus or 0, profile.max_gpus or max(capacity_of, default=0)
    sizes = sorted(size for size in capacity_of if low <= size <= high)
    if not sizes:
        raise ConfigError(f"no size between {low} and {high} GPUs; there are {sorted(capacity_of)}")
    capacities = [capacity_of[size] for size in sizes]
    if any(a >= b for a, b in pairwise(capacities)):
        raise ConfigError(f"capacities {capacities} of {sizes} GPUs: expected to rise with size")
    peak = max(rates)
    enough = [i for i, c in enumerate(capacities) if peak <= policy.up_load * c]
    if not enough:
        raise ConfigError(
            f"the peak of {peak:.3g} requests/s needs a capacity of {peak / policy.up_load:.3g}, "
            f"and {sizes[-1]} GPUs have {capacities[-1]:.3g}; allow more GPUs"
        )
    rng = np.random.default_rng(seed)
    ticks = max(1, round(profile.slot_s / tick_s))
    arrivals_N = np.concatenate([rng.poisson(rate * tick_s, ticks) for rate in rates])
    day = _Day(sizes, capacities, policy, tick_s, profile.wait_limit_s, price_per_gpu_hour)
    return DayComparison(
        fixed=day.run(arrivals_N, enough[0], follow=False),
        following=day.run(arrivals_N, 0, follow=True),
    )


@dataclass(frozen=True)
class _Day:
    sizes: Sequence[int]
    capacities: Sequence[float]
    policy: ScalePolicy
    tick_s: float
    wait_limit_s: float
    price: float | None

    def run(self, arrivals_N: np.ndarray, index: int, follow: bool) -> DayResult:
        """From size `index` on. With `follow` it starts at the size for the first rate."""
        if follow:
            first = arrivals_N[: round(60 / self.tick_s) + 1].mean() / self.tick_s
            fits = [i for i, c in enumerate(self.capacities) if first <= self.policy.up_load * c]
            index = fits[0] if fits else len(self.sizes) - 1
        target, ready_s, changed_s = index, 0.0, -self.policy.cooldown_s
        queue, rate, gpu_s, changes = 0.0, float(arrivals_N[0]) / self.tick_s, 0.0, 0
        smooth = min(1.0, self.tick_s / 30)  # rates are what half a minute or so saw
        waits, sizes, queues = [], [], []
        for number, arrived in enumerate(arrivals_N):
            now = number * self.tick_s
            if target != index and now >= ready_s:
                index = target
            rate += smooth * (arrived / self.tick_s - rate)
            if follow and target == index:
                target = decide(self.policy, self.capacities, index, rate, queue, now - changed_s)
                if target != index:
                    ready_s, changed_s, changes = now + self.policy.change_s, now, changes + 1
            capacity = self.capacities[index]
            waits.append((queue + arrived / 2) / capacity if queue else 0.0)
            queue = max(0.0, queue + float(arrived) - capacity * self.tick_s)
            paid = max(self.sizes[index], self.sizes[target])
            gpu_s += paid * self.tick_s
            sizes.append(paid)
            queues.append(queue)
        return self._result(arrivals_N, np.array(waits), gpu_s / 3600, changes, sizes, queues)

    def _result(
        self,
        arrivals_N: np.ndarray,
        wait_N: np.ndarray,
        gpu_hours: float,
        changes: int,
        sizes: list[int],
        queues: list[float],
    ) -> DayResult:
        total = max(int(arrivals_N.sum()), 1)
        order = wait_N.argsort()
        at_p99 = int((arrivals_N[order].cumsum() < 0.99 * total).sum())
        every = max(1, len(sizes) // 288)
        return DayResult(
            gpu_hours=gpu_hours,
            cost=None if self.price is None else gpu_hours * self.price,
            changes=changes,
            mean_wait_s=float((wait_N * arrivals_N).sum() / total),
            p99_wait_s=float(wait_N[order][min(at_p99, len(order) - 1)]),
            late=float(arrivals_N[wait_N > self.wait_limit_s].sum() / total),
            unserved=queues[-1],
            time_s=tuple(i * self.tick_s for i in range(0, len(sizes), every)),
            sizes=tuple(sizes[::every]),
            queue=tuple(queues[::every]),
        )


def max_rate(
    run_at: Callable[[float], SimConfig],
    first: float,
    *,
    goodput_share: float = 0.95,
    runs: int = 12,
) -> tuple[float, SimResult]:
    """The highest request rate that is steady with `goodput_share` of it within the limits, and
    what happens there; by doubling or halving from `first`, then bisection.

    Args:
        run_at: the configuration for a rate.

    Raises:
        ConfigError: no rate that was tried is served.
    """
    low, best, high = 0.0, None, float("inf")
    rate = first
    for _ in range(runs):
        result = simulate(run_at(rate))
        good, all_ = result.goodput, result.request_rate
        if good is not None and all_ and good >= goodput_share * all_:
            low, best = rate, result
        else:
            high = rate
        if high < float("inf") and low and high / low < 1.03:
            break
        rate = 2 * rate if high == float("inf") else (low + high) / 2
    if best is None:
        raise ConfigError(
            f"no request rate from {high:.3g} to {first:.3g} requests/s is served within the limits"
        )
    return low, best
