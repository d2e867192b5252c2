"""A rank process of test_group.py: random exchanges of its attention group, checked by itself.

Arguments: rank, ranks, tp, "shm", "gloo" or "nccl", JSON of descriptors, rendezvous, what: "random"
or "absent" (the last rank of the first group stays away).
"""

import json
import os
import sys
import time

import torch

from crossdock.comm import build_group, build_world, tensor_bytes
from crossdock.core import CapacityError, RankLost, share_of
from crossdock.metrics import Recorder

TOKENS, HIDDEN, EXCHANGES = 13, 24, 120


def tensor(step: int, rank: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype)


def check(group, first: int, kind: str) -> None:
    """Two groups draw different steps, so that one is often ahead of the other."""
    device = "cuda" if kind == "nccl" else "cpu"
    draw = torch.Generator().manual_seed(first)
    late = torch.Generator().manual_seed(first * 100 + group.rank)
    for step in range(EXCHANGES):
        tokens = int(torch.randint(1, TOKENS + 1, (1,), generator=draw))
        what = int(torch.randint(0, 3, (1,), generator=draw))
        dtype = (torch.float32, torch.bfloat16)[int(torch.randint(0, 2, (1,), generator=draw))]
        every = [tensor(step, first + r, tokens, dtype).to(device) for r in range(group.size)]
        mine, own = every[group.rank], share_of(tokens, group.size, group.rank)
        if torch.rand(1, generator=late) < 0.1:
            time.sleep(0.003)
        if what == 0:
            want = torch.cat([x[share_of(tokens, group.size, r)] for r, x in enumerate(every)])
            got = group.all_gather(mine[own], tokens)
        elif what == 1:
            want = sum(x.float() for x in every)[own].to(dtype)
            before = mine.clone()
            got = group.reduce_scatter(mine)
            assert torch.equal(mine, before)
        else:
            want = every[0]
            got = group.broadcast(mine.clone())
        assert got.dtype == want.dtype and got.shape == want.shape
        if what == 1 and kind != "shm":
            torch.testing.assert_close(
                got, want, atol=0.05 if dtype.itemsize == 2 else 1e-6, rtol=0
            )
        else:
            assert torch.equal(got, want), (step, what)
    if kind == "shm":
        try:
            group.reduce_scatter(torch.zeros(TOKENS + 1, HIDDEN))
        except CapacityError as error:
            assert f"{(TOKENS + 1) * HIDDEN * 4} bytes" in str(error)
        else:
            raise AssertionError("no error")
    ids = group.broadcast(torch.arange(7, device=device) * (group.rank + 1))
    assert ids.tolist() == list(range(7))


def check_graph(group) -> None:
    """Exchanges of a captured step, with other values at each replay."""
    x_TH = torch.zeros(TOKENS, HIDDEN, device="cuda")
    ids = torch.zeros(5, dtype=torch.int64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return group.all_gather(group.reduce_scatter(x_TH), TOKENS), group.broadcast(ids.clone())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sum_TH, told = step()
    for turn in range(5):
        x_TH.copy_(tensor(turn, group.rank, TOKENS, torch.float32))
        ids.fill_(10 * turn + group.rank)
        graph.replay()
        want = sum(tensor(turn, r, TOKENS, torch.float32) for r in range(group.size))
        torch.testing.assert_close(sum_TH.cpu(), want, atol=1e-6, rtol=0)
        assert told.tolist() == [10 * turn] * 5


def main() -> None:
    rank, ranks, tp = map(int, sys.argv[1:4])
    kind, fds, rendezvous, what = sys.argv[4], json.loads(sys.argv[5]), sys.argv[6], sys.argv[7]
    # The other group only has to be whole, however late its ranks start.
    deadline = 1.0 if what == "absent" and rank < tp else 30.0
    device, transport = ("cuda", "collective") if kind == "nccl" else ("cpu", "shm")
    world = build_world(rank, ranks, device, transport, fds, rendezvous, deadline, tp)
    recorder = Recorder()
    group = build_group(world, tensor_bytes(TOKENS, HIDDEN, 4), recorder)
    first = rank - rank % tp
    assert (group.size, group.rank, type(group).__name__) == (
        tp, rank - first, "ShmGroup" if kind == "shm" else "CollectiveGroup"
    )  # fmt: skip
    if what == "random":
        check(group, first, kind)
        if kind == "shm":
            assert recorder.calls["wait"] > EXCHANGES
        if kind == "nccl":
            check_graph(group)
    elif rank != tp - 1:
        try:
            group.all_gather(torch.zeros(1, HIDDEN), tp)
        except RankLost as error:
            assert first == 0 and error.rank == tp - 1, error
            assert f"gather 1 of its attention group within 1 s: rank {tp - 1}" in str(error)
        else:
            assert first > 0  # the other group is whole


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo aborts now and then when its peers are gone first
