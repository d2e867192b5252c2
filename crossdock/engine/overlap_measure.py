"""At the start: steps of made-up batches in each overlap mode, and which mode pays from what size.

All ranks take part and decide alike, from the times of the slowest rank. What a step costs is a
matter of the machine and of what else runs on it, so a mode must win clearly, or it stays out.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from crossdock.comm import World, await_start
from crossdock.core import OverlapMode, Plan
from crossdock.engine.made_up import Limits, Meter, made_up, prefills
from crossdock.engine.overlap import OverlapPolicy, Rung
from crossdock.engine.runner import Runner

_FIRST_TOKENS, _FACTOR = 8, 4
"""Sizes: the first, and how much larger each next one is."""
_REPEATS = 5
_GAIN = 0.98
"""Median time over that of another mode, of neighbours in time, at which a mode pays."""
_BUDGET_S = {"cpu": 0.5, "cuda": 3.0}
"""What measuring may take. Sizes whose steps are longer are left out: the largest that was measured
stands for them."""
_FIRST_PREFILL = 512
"""Tokens of the smallest step of prompts, where decodes are measured apart."""


def measure_overlap(
    modes: Sequence[OverlapMode], runner: Runner, world: World, limits: Limits
) -> OverlapPolicy:
    """Collective, before any request: the cache is cleared again, what was counted meanwhile is the
    caller's to forget.

    Args:
        modes: beside "off", those that can run.
    """
    world.board.enter("agree", step=0)
    await_start(world)
    meter, graphs = Meter(runner, world), runner.graphs
    # On a CPU both do the same in another order, and "sbo" waits less for other ranks; on a GPU it
    # takes a stream more and leaves the exchange fewer multiprocessors.
    usual: OverlapMode = "sbo" if "sbo" in modes and world.device.type == "cpu" else "off"
    budget, most = _BUDGET_S[world.device.type], limits.max_num_batched_tokens
    group = world.rank // world.tp
    if graphs is None:
        plans = (made_up(tokens, limits, group) for tokens in _sizes(most))
        ladder = _climb(plans, meter, modes, usual, budget)
        replayed: tuple[Rung, ...] = ()
    else:  # decodes are measured apart
        sizes = [size for size in _sizes(most) if size >= _FIRST_PREFILL] or [most]
        plans = (prefills(tokens, limits, group) for tokens in sizes)
        ladder = _climb(plans, meter, modes, usual, budget)
        top = graphs.decode_sizes[-1]
        decodes = (made_up(size, limits, group) for size in _sizes(top) if size <= most)
        replayed = _climb(decodes, meter, modes, usual, budget)
    runner.kv.clear(meter.pages)
    why = f"measured up to {ladder[-1].tokens} tokens a rank"
    if replayed:
        why += f", decodes up to {replayed[-1].tokens}"
    if len(ladder) == len(replayed) == 1 or (len(ladder) == 1 and not replayed):
        why = f"steps take too long to be measured in {budget:g} s"
    return OverlapPolicy("auto", ladder, why, replayed)


def _climb(
    plans: Iterable[Plan],
    meter: Meter,
    modes: Sequence[OverlapMode],
    usual: OverlapMode,
    budget: float,
) -> tuple[Rung, ...]:
    spent, rungs = 0.0, [Rung(0, usual)]
    for plan in plans:
        if plan.num_tokens <= rungs[-1].tokens:
            break
        meter.seconds(plan, "off")  # compiles, and takes memory
        step = meter.seconds(plan, "off")
        spent += step * (1 + (_REPEATS + 1) * (len(modes) + 1))
        if spent > budget:
            break
        times = _compare(meter, plan, ("off", *modes))
        rungs.append(choose_rung(plan.num_tokens, times, usual))
    return tuple(rungs)


def _sizes(most: int) -> Iterator[int]:
    tokens = _FIRST_TOKENS
    while tokens < most:
        yield tokens
        tokens *= _FACTOR
    yield most


def _compare(
    meter: Meter, plan: Plan, modes: Sequence[OverlapMode]
) -> dict[OverlapMode, list[float]]:
    """Seconds of each repeat; modes take turns."""
    for mode in modes[1:]:
        meter.seconds(plan, mode)
    turns = [modes if turn % 2 == 0 else modes[::-1] for turn in range(_REPEATS)]
    times: dict[OverlapMode, list[float]] = {mode: [] for mode in modes}
    for turn in turns:
        for mode in turn:
            times[mode].append(meter.seconds(plan, mode))
    return times


def choose_rung(tokens: int, times: dict[OverlapMode, list[float]], usual: OverlapMode) -> Rung:
    """Of whole batches the usual mode unless the other pays; halves if they pay against that."""
    whole = usual
    other: OverlapMode = "sbo" if usual == "off" else "off"
    if other in times and pays(times[other], times[usual]):
        whole = other
    halves = "tbo" in times and pays(times["tbo"], times[whole])
    ms = {mode: round(median(t) * 1e3, 4) for mode, t in times.items()}
    return Rung(tokens, whole, halves, ms)


def pays(times: Sequence[float], base: Sequence[float]) -> bool:
    """Whether the median ratio of neighbours in time says so, and all ratios but one agree."""
    ratios = sorted(t / b for t, b in zip(times, base, strict=True))
    return median(ratios) <= _GAIN and ratios[-2] < 1
