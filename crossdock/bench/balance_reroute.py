"""How long choosing copies by quota takes a rank in a layer, without the exchange of counts."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from crossdock.balance import POLICIES, Problem
from crossdock.balance.generate import draw_loads, zipf_weights
from crossdock.bench.balance_choice import EXPERTS, RATIO, REDUNDANT, SEED, TOP_K
from crossdock.bench.meter import CudaMeter, HostMeter, work_of
from crossdock.bench.report import Case, case_of
from crossdock.comm import build_world
from crossdock.core import Placement
from crossdock.moe.quota import QuotaMap

MOST_US = 100.0
"""At EP64 on a GPU."""
TOKENS = (128, 2048)
DEADLINE_S = 60.0


def reroute_times(ranks: Sequence[int], repeats: int) -> list[Case]:
    """On a GPU if there is one, as replays of a graph, which a wait for the host would refuse; else
    the host's form on a core."""
    world = build_world(0, 1, "auto", "local", {}, "", DEADLINE_S)
    on_gpu = world.device.type == "cuda"
    meter = CudaMeter(world) if on_gpu else HostMeter(world)
    works = {
        (size, tokens): work_of(_reroute(size, tokens, world.device, on_gpu))
        for size in ranks
        for tokens in TOKENS
    }
    times = meter.measure(works, repeats, 10)
    cases = []
    for (size, tokens), by_kind in times.items():
        values = by_kind["graph" if on_gpu else "eager"]
        shape = {"ranks": size, "tokens": tokens, "device": world.device.type}
        target = MOST_US if on_gpu and size == 64 else None
        cases.append(case_of("reroute", values, "us", "lower", shape, target=target))
    return cases


def _reroute(ranks: int, tokens: int, device: torch.device, on_gpu: bool) -> Callable[[], object]:
    rng = np.random.default_rng(SEED)
    weight_E = zipf_weights(EXPERTS, ranks, TOP_K, RATIO, rng)
    planned_E = draw_loads(weight_E, 2048 * ranks, TOP_K, rng)
    problem = Problem(planned_E[None], ranks, EXPERTS // ranks + REDUNDANT)
    slots_LP = POLICIES["eplb"](problem).slot_expert_LP
    quota_map = QuotaMap(Placement(0, slots_LP, EXPERTS, ranks), 0, 0, device, on_gpu)
    counts_RE = np.array([draw_loads(weight_E, tokens, TOP_K, rng) for _ in range(ranks)])
    # The order of a rank's choices does not matter here, so any that has its counts will do.
    ids = rng.permutation(np.repeat(np.arange(EXPERTS), counts_RE[0]))
    ids_TK = torch.tensor(ids, device=device).view(tokens, TOP_K)
    tokens_RE = torch.tensor(counts_RE, device=device)
    return lambda: quota_map(ids_TK, tokens_RE)
