"""A rank of `bench comm` over NVLink; started by `python -m`."""

from dataclasses import dataclass
from typing import Any

import torch

from crossdock.bench.child import answer_requests
from crossdock.bench.comm_case import LINK, OTHER_FORMS, OURS, CommCase, draw
from crossdock.bench.comm_check import check_case
from crossdock.bench.comm_deepep import DeepEpExchange, find_deep_ep, join_default_group
from crossdock.bench.comm_nccl import NcclExchange, link_copy
from crossdock.bench.comm_nvlink import NvlinkCase
from crossdock.bench.meter import CudaMeter, HostMeter, Meter, Work
from crossdock.bench.rank_world import join
from crossdock.comm import World


@dataclass(frozen=True, eq=False)
class Rank:
    """`copy`: what the link alone takes; None where there is none. `deep_ep`: module, version and
    group; the module is None where it cannot be imported."""

    world: World
    meter: Meter
    copy: Work | None
    deep_ep: tuple[Any, str, Any]


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    world = join(settings)
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else ""
    meter: Meter = CudaMeter(world) if on_gpu else HostMeter(world)
    copy = link_copy(world) if on_gpu and world.size > 1 else None
    module, version = find_deep_ep(world)
    group = join_default_group(world, settings["rendezvous"]) if module else None
    facts = {"device": name, "deep_ep": version if module else f"not run: {version}"}
    return Rank(world, meter, copy, (module, version, group)), facts


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Checks, then times a case: `{"times": [(who, what, {kind: [us]})], ...}`."""
    world = rank.world
    case, seed = CommCase(**request["case"]), request["seed"]
    torch.manual_seed(1000 * seed + world.rank)
    inputs = draw(case, world.rank, seed, world.device)
    nvlink = NvlinkCase(case, world, inputs, request["programs"])
    works: dict[tuple[str, str], Work] = {}
    for form in (nvlink, nvlink.in_two_launches()):
        check_case(form, world, seed + 1)
        for what, work in form.works().items():
            works[OURS if form.is_default(what) else OTHER_FORMS[form.fused], what] = work
    if case.ranks > 1 and not case.per_expert:  # which nobody else offers
        works |= NcclExchange(case, world.group, inputs).works()
        if rank.deep_ep[0] is not None:
            works |= DeepEpExchange(*rank.deep_ep, case, inputs).works()
    if rank.copy is not None:
        works[LINK, "copy"] = rank.copy
    times = rank.meter.measure(works, request["turns"], request["reps"])
    nvlink.exchange.check()
    return {
        "times": [[*key, kinds] for key, kinds in times.items()],
        "link_rows": [case.busiest_link(seed, each) for each in (False, case.per_expert)],
        "row_bytes": nvlink.row_bytes,
        "programs": nvlink.exchange.programs,
    }


def stop(rank: Rank) -> None:
    pass


if __name__ == "__main__":
    answer_requests(start, run, stop)
