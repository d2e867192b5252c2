"""A rank of `bench comm`, with both transports over the same world; started by `python -m`."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from crossdock.bench.child import answer_requests
from crossdock.comm import World, build_transport, build_world
from crossdock.core import Routing, Rows, Transport
from crossdock.metrics import Recorder

DEADLINE_S = 60.0


@dataclass(frozen=True, eq=False)
class Rank:
    world: World
    transports: dict[str, Transport]
    settings: dict[str, Any]


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    """Settings: rank, ranks, fd, rendezvous, max_tokens, hidden, experts, top_k, transports."""
    torch.set_num_threads(1)
    fds, rendezvous = {"shm": settings["fd"]}, settings["rendezvous"]
    # A world that has what the collective transport needs, and the shared memory too.
    world = build_world(
        settings["rank"], settings["ranks"], "cpu", "collective", fds, rendezvous, DEADLINE_S
    )
    transports = {
        kind: build_transport(
            kind,
            world,
            max_tokens=settings["max_tokens"],
            hidden=settings["hidden"],
            top_k=settings["top_k"],
            slots_per_rank=settings["experts"] // settings["ranks"],
            dtype=torch.float32,
            per_expert=False,
            recorder=Recorder(),
        )
        for kind in settings["transports"]
    }
    return Rank(world, transports, settings), {}


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one dispatch + combine of `tokens` tokens, over `exchanges` in a row.

    In a row as a step does them: a rank that comes late to one makes all wait, and the next begins
    at once.
    """
    transport, settings = rank.transports[request["transport"]], rank.settings
    x_TH = torch.randn(request["tokens"], settings["hidden"])
    weights_TK = torch.rand(request["tokens"], settings["top_k"])
    scores_TE = torch.rand(request["tokens"], settings["experts"])
    routing = Routing(scores_TE.topk(settings["top_k"]).indices, weights_TK)
    count = request["exchanges"]
    rank.world.lockstep.exchange([0])  # all begin together
    begin = time.perf_counter()
    for _ in range(count):
        received, ticket = transport.dispatch_end(transport.dispatch_begin(x_TH, routing))
        assert isinstance(received, Rows)
        transport.combine_end(transport.combine_begin(received.x_NH, ticket))
    return {"seconds": (time.perf_counter() - begin) / count}


def stop(rank: Rank) -> None:
    for transport in rank.transports.values():
        transport.close()


if __name__ == "__main__":
    answer_requests(start, run, stop)
