"""One rank of `measure_here`."""

from typing import Any

import torch.distributed as dist

from crossdock.bench.child import answer_requests
from crossdock.bench.measure import measure_in_group


def _start(settings: dict[str, Any]) -> tuple[None, dict[str, Any]]:
    device, rank = settings["device"], settings["rank"]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{settings['store']}",
        rank=rank,
        world_size=settings["ranks"],
    )
    try:
        return None, measure_in_group(device, rank)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    answer_requests(_start, lambda engine, request: {}, lambda engine: None)
