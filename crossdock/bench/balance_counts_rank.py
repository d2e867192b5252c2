"""A rank of the timing of exchanges of counts between GPUs; started by `python -m`."""

from typing import Any

import torch

from crossdock.bench.child import answer_requests
from crossdock.bench.meter import CudaMeter, work_of
from crossdock.bench.rank_world import join, symmetric_buffer
from crossdock.comm import World
from crossdock.comm.nvlink import NvlinkCounts, NvlinkExchange, NvlinkLayout, nvlink_counts_bytes


def start(settings: dict[str, Any]) -> tuple[World, dict[str, Any]]:
    return join(settings), {}


@torch.inference_mode()
def run(world: World, request: dict[str, Any]) -> dict[str, Any]:
    """`{"graph": [us]}`, one for each turn; the ranks are checked to have each other's counts."""
    experts, size = request["experts"], world.size
    # It tells of ranks that do not come; no row is exchanged.
    layout = NvlinkLayout(size, 1, 128, 1, 2)
    buffers = [
        symmetric_buffer(world, n) for n in (layout.nbytes, nvlink_counts_bytes(size, experts))
    ]
    exchange = NvlinkExchange(
        world.rank, layout, buffers[0], 1, torch.bfloat16, world.waiter.deadline_s
    )
    counts = NvlinkCounts(exchange, experts, buffers[1])
    own_E = torch.arange(experts, dtype=torch.int32, device=world.device) * (world.rank + 1)
    want_RE = [[e * (r + 1) for e in range(experts)] for r in range(size)]
    assert counts.gather(own_E).tolist() == want_RE
    times = CudaMeter(world).measure(
        {"counts": work_of(lambda: counts.gather(own_E))}, request["turns"], request["reps"]
    )
    exchange.check()
    return {"graph": times["counts"]["graph"]}


def stop(world: World) -> None:
    pass


if __name__ == "__main__":
    answer_requests(start, run, stop)
