"""The same requests under several configurations: what rebalancing, overlap or a ratio does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from crossdock.core import ConfigError
from crossdock.planner.simulate.config import Pool, SimConfig
from crossdock.planner.simulate.result import SimResult
from crossdock.planner.simulate.run import simulate

Overlap = Literal["off", "sbo", "tbo"]


@dataclass(frozen=True)
class Comparison:
    """`results` by name, the given configuration first."""

    results: Mapping[str, SimResult]

    def to_json(self) -> dict[str, Any]:
        return {name: result.to_json() for name, result in self.results.items()}


def compare(
    configs: Mapping[str, SimConfig], on_progress: Callable[[float], None] = lambda share: None
) -> Comparison:
    """Each of `configs`, one after another."""
    results = {}
    for number, (name, config) in enumerate(configs.items()):

        def part(share: float, done: int = number) -> None:
            on_progress((done + share) / len(configs))

        results[name] = simulate(config, part)
    return Comparison(results)


def without_rebalancing(config: SimConfig) -> dict[str, SimConfig]:
    if config.rebalance is None:
        raise ConfigError("the configuration does not rebalance: nothing to compare with")
    return {"rebalanced": config, "as placed": replace(config, rebalance=None)}


def overlaps(config: SimConfig, pool: int, kinds: tuple[Overlap, ...]) -> dict[str, SimConfig]:
    """`config` with each kind of overlap in its pool of that index."""
    return {kind: _with_layout(config, pool, overlap=kind) for kind in kinds}


def ratios(config: SimConfig, ratios: tuple[tuple[int, int], ...]) -> dict[str, SimConfig]:
    """`config` with each number of (prefill, decode) instances."""
    if len(config.pools) != 2:
        raise ConfigError("a ratio needs a prefill and a decode pool")
    prefill, decode = config.pools
    return {
        f"{p}:{d}": replace(
            config, pools=(replace(prefill, instances=p), replace(decode, instances=d))
        )
        for p, d in ratios
    }


def _with_layout(config: SimConfig, index: int, **changes: Any) -> SimConfig:
    pools: list[Pool] = list(config.pools)
    pools[index] = replace(pools[index], layout=replace(pools[index].layout, **changes))
    return replace(config, pools=tuple(pools))
