"""How long choosing copies by quota takes a rank in a layer, and the exchange of counts for it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdock.balance import POLICIES, Problem
from crossdock.balance.generate import draw_loads, zipf_weights
from crossdock.bench.balance_choice import EXPERTS, RATIO, REDUNDANT, SEED, TOP_K
from crossdock.bench.meter import CudaMeter, HostMeter, Work, work_of
from crossdock.bench.ranks import Ranks, visible_gpus
from crossdock.bench.report import Case, case_of
from crossdock.comm import build_world
from crossdock.core import Placement
from crossdock.moe.quota import QuotaMap

MOST_US = 100.0
"""At EP64 on a GPU."""
TOKENS = (128, 2048, 4096)
DEADLINE_S = 60.0
WHOLE, PLANNING = "reroute", "reroute_planning"


@dataclass(frozen=True, eq=False)
class _Step:
    """Of one rank of many. tokens_RE: what the others' counts would be."""

    placement: Placement
    ids_TK: Tensor
    tokens_RE: Tensor


def reroute_times(ranks: Sequence[int], repeats: int) -> list[Case]:
    """On a GPU if there is one, as replays of a graph, which a wait for the host would refuse; else
    the host's form on a core."""
    world = build_world(0, 1, "auto", "local", {}, "", DEADLINE_S)
    on_gpu = world.device.type == "cuda"
    meter = CudaMeter(world) if on_gpu else HostMeter(world)
    works: dict[tuple[str, int, int], Work] = {}
    for size in ranks:
        for tokens in TOKENS:
            step = _draw(size, tokens, world.device)
            works[WHOLE, size, tokens] = work_of(_whole(step, on_gpu))
            if on_gpu:
                works[PLANNING, size, tokens] = work_of(_planning(step))
    times = meter.measure(works, repeats, 10)
    device = torch.cuda.get_device_name(world.device) if on_gpu else "cpu"
    cases = []
    for (name, size, tokens), by_kind in times.items():
        values = by_kind["graph" if on_gpu else "eager"]
        shape = {"ranks": size, "tokens": tokens, "device": device}
        target = MOST_US if on_gpu and size == 64 and name == WHOLE else None
        cases.append(case_of(name, values, "us", "lower", shape, target=target))
    return cases


def exchange_times(repeats: int) -> list[Case]:
    """Of counts, between the GPUs there are; none where there are fewer than two."""
    gpus = visible_gpus()
    if gpus < 2:
        return []
    with ExitStack() as stack:
        ranks = Ranks("crossdock.bench.balance_counts_rank", gpus, "cuda", {}, stack)
        answers = ranks.ask({"experts": EXPERTS, "turns": repeats, "reps": 10})
    values = [us for answer in answers for us in answer["graph"]]
    shape = {"ranks": gpus, "tokens": "", "device": torch.cuda.get_device_name()}
    return [case_of("counts_exchange", values, "us", "lower", shape)]


def _draw(ranks: int, tokens: int, device: torch.device) -> _Step:
    rng = np.random.default_rng(SEED)
    weight_E = zipf_weights(EXPERTS, ranks, TOP_K, RATIO, rng)
    planned_E = draw_loads(weight_E, 2048 * ranks, TOP_K, rng)
    problem = Problem(planned_E[None], ranks, EXPERTS // ranks + REDUNDANT)
    slots_LP = POLICIES["eplb"](problem).slot_expert_LP
    counts_RE = np.array([draw_loads(weight_E, tokens, TOP_K, rng) for _ in range(ranks)])
    # The order of a rank's choices does not matter here, so any that has its counts will do.
    ids = rng.permutation(np.repeat(np.arange(EXPERTS), counts_RE[0]))
    dtype = torch.int32 if device.type == "cuda" else torch.int64
    return _Step(
        Placement(0, slots_LP, EXPERTS, ranks),
        torch.tensor(ids, device=device).view(tokens, TOP_K),
        torch.tensor(counts_RE, device=device, dtype=dtype),
    )


def _whole(step: _Step, on_gpu: bool) -> Callable[[], object]:
    """Counting, planning and choosing; the counts of the others are there."""
    quota_map = QuotaMap(step.placement, 0, 0, step.ids_TK.device, on_gpu)
    return lambda: quota_map(step.ids_TK, lambda own_E: step.tokens_RE)


def _planning(step: _Step) -> Callable[[], object]:
    """The quotas of all ranks alone."""
    from crossdock.kernels.reroute import fill_quotas  # imports triton

    quota_map = QuotaMap(step.placement, 0, 0, step.ids_TK.device, True)
    copies = quota_map.copies
    assert copies is not None
    return lambda: fill_quotas(step.tokens_RE, copies)
