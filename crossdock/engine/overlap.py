"""What a step does while rows travel, agreed by all ranks: nothing, the shared expert (SBO), or the
other half of the batch (TBO)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from crossdock.core import ConfigError, EngineConfig, ModelSpec, OverlapMode, Plan, Scheduled
from crossdock.core.batch import GraphSize

_BOUNDARY = 1 / 8
"""Of the tokens of a batch: so far from the middle a cut may be that spares a sequence."""
_UNEVEN = 1.25
"""The largest halves together, over the largest batch, beyond which halves do not line up."""


@dataclass(frozen=True)
class Rung:
    """What runs from so many tokens of the fullest rank on: `whole`, of batches in one, and whether
    halves are faster. `ms`: what a step was measured to take in each mode."""

    tokens: int
    whole: OverlapMode
    halves: bool = False
    ms: dict[OverlapMode, float] = field(default_factory=dict)

    @property
    def mode(self) -> OverlapMode:
        """Of batches that have two halves."""
        return "tbo" if self.halves else self.whole


@dataclass(frozen=True)
class OverlapPolicy:
    """The same on all ranks. `ladder`: by rising tokens, from 0 on; `graphs`: likewise, of steps
    that replay a graph, where that was measured apart."""

    setting: str
    ladder: tuple[Rung, ...]
    why: str
    graphs: tuple[Rung, ...] = ()

    @property
    def halving(self) -> bool:
        return any(rung.halves for rung in self.ladder)

    def cut(self, plan: Plan) -> int:
        """Tokens of the first half; 0 where this engine never halves."""
        return middle([len(item.tokens) for item in plan.items]) if self.halving else 0

    def choose(self, most: int, most_first: int, most_second: int) -> OverlapMode:
        """
        Args:
            most: tokens of the rank that has most. most_first, most_second: of the halves.
        """
        return self._choose(self.ladder, most, most_first, most_second)

    def _choose(
        self, ladder: tuple[Rung, ...], most: int, most_first: int, most_second: int
    ) -> OverlapMode:
        rung = next(r for r in reversed(ladder) if r.tokens <= most)
        two = most_first > 0 and most_second > 0
        even = self.setting == "tbo" or most_first + most_second <= _UNEVEN * most
        return "tbo" if rung.halves and two and even else rung.whole

    def choose_graph(self, size: GraphSize) -> OverlapMode | None:
        """Of a step that replays a graph; None: it has none in the mode that pays."""
        half = size.rows // 2
        ladder = self.ladder if size.prompts else self.graphs or self.ladder
        mode = self._choose(ladder, size.rows, half, size.rows - half)
        return None if mode == "tbo" and not size.halves else mode

    def describe(self) -> dict[str, Any]:
        """For people and documents; holds what JSON can."""
        return {
            "setting": self.setting,
            "why": self.why,
            "ladder": [asdict(rung) for rung in self.ladder],
            "graphs": [asdict(rung) for rung in self.graphs],
        }


def refusals(config: EngineConfig, spec: ModelSpec) -> dict[OverlapMode, str]:
    """Why a mode cannot run; the others can."""
    found: dict[OverlapMode, str] = {}
    if not spec.moe.shared_intermediate_size:
        found["sbo"] = "the model has no shared expert to run while rows travel"
    if config.max_num_batched_tokens == 1:
        found["tbo"] = "max_num_batched_tokens is 1, and no batch of one token has two halves"
    if config.tp > 1 and config.device == "cuda":
        found["tbo"] = "with tp > 1 NCCL's kernels would run beside ones that wait for other ranks"
    nothing = None
    if not spec.moe_layers:
        nothing = "no layer has experts, so no rows travel"
    elif config.ranks == 1 and config.transport != "nvlink":
        nothing = "no rows travel on one rank (transport local)"
    return found if nothing is None else {"sbo": nothing, "tbo": nothing}


def check_overlap(config: EngineConfig, spec: ModelSpec) -> None:
    """
    Raises:
        ConfigError: what was set cannot run.
    """
    against = refusals(config, spec)
    if config.overlap != "auto" and config.overlap in against:
        others = [mode for mode in ("off", "sbo", "tbo") if mode not in against]
        raise ConfigError(
            f"overlap {config.overlap!r} cannot run: {against[config.overlap]}; "
            f"set it to {', '.join(others)} or auto"
        )


def forced(setting: OverlapMode) -> OverlapPolicy:
    """One mode for all steps; where nobody has a second half, `tbo` leaves the batch whole."""
    rung = Rung(0, "off", halves=True) if setting == "tbo" else Rung(0, setting)
    return OverlapPolicy(setting, (rung,), "as set")


def unmeasured(why: str) -> OverlapPolicy:
    """`off`, where there is nothing to choose."""
    return OverlapPolicy("auto", (Rung(0, "off"),), why)


def middle(lens: Sequence[int]) -> int:
    """Where to cut sequences of these lengths, those of one token first, in two: between two of
    them where that is about the middle, else inside one, leaving no single token before the cut
    (behind longer sequences it would look like a decode out of its place)."""
    total = sum(lens)
    half = total // 2
    ends = [0, *accumulate(lens)]
    nearest = min(ends, key=lambda end: abs(end - half))
    if abs(nearest - half) <= total * _BOUNDARY:
        return nearest
    return even_cut(lens)


def even_cut(lens: Sequence[int]) -> int:
    """The same, of captured steps, whose halves have room for no more: as near to half as is."""
    half = sum(lens) // 2
    start = max(end for end in (0, *accumulate(lens)) if end <= half)
    return half if start == half else max(half, start + 2)


def halve(plan: Plan, cut: int, page_size: int) -> tuple[Plan, Plan]:
    """The first `cut` tokens, and the rest. Of a sequence that is cut the second part sees the KV
    of the first as that of an earlier step: in each layer the first half's attention must come
    before the second's."""
    first: list[Scheduled] = []
    second: list[Scheduled] = []
    for item in plan.items:
        count = len(item.tokens)
        if count <= cut:
            first.append(item)
        elif cut <= 0:
            second.append(item)
        else:
            end = item.start + cut
            pages = item.pages[: -(-end // page_size)]
            first.append(item._replace(tokens=item.tokens[:cut], pages=pages, sample=False))
            second.append(item._replace(start=end, tokens=item.tokens[cut:]))
        cut -= min(cut, count)
    return Plan(tuple(first)), Plan(tuple(second))
