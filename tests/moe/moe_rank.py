"""One rank process of the MoE tests: runs its share of the tokens of each case through one layer.

Run as `python moe_rank.py RANK DEVICE SIZE:KIND:SHM_FD:DIRECTORY ...`. A case, DIRECTORY/case.npz,
runs on the first SIZE ranks, each of which writes DIRECTORY/out<RANK>.npz.
"""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from crossdock.comm import build_apart, build_transport, build_world
from crossdock.core import MoESpec, Placement
from crossdock.kernels.quant import quantise_weights
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoEWeights, build_moe_layer


def drive(*forwards):
    """The generators' results, driven in turns, and how often they yielded together."""
    yields, done = 0, [None] * len(forwards)
    while any(result is None for result in done):
        for i, forward in enumerate(forwards):
            try:
                if done[i] is None:
                    next(forward)
                    yields += 1
            except StopIteration as stop:
                done[i] = stop.value
    return done, yields


def run(case, rank, world, kind, invariant, dtype):
    products = choose_products(invariant)
    placement = Placement(0, case["placement"], int(case["experts"]), world.size)
    experts = placement.local_slots(1, rank)
    local = np.maximum(experts, 0)
    spec = MoESpec(
        int(case["experts"]),
        int(case["top_k"]),
        case["down"].shape[2],
        scoring="sigmoid",
        correction_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    )
    device = world.device
    gate_up, down = (
        torch.from_numpy(case[name][local]).to(device, dtype) for name in ("gate_up", "down")
    )
    gate_up[experts < 0] = down[experts < 0] = float("nan")
    scales = (None, None)
    fp8 = bool(case["fp8"])
    if fp8:
        (gate_up, scale), (down, down_scale) = quantise_weights(gate_up), quantise_weights(down)
        scales = scale, down_scale
    router, bias = (torch.from_numpy(case[name]).to(device) for name in ("router", "bias"))
    weights = MoEWeights(router, bias, gate_up, down, *scales)
    recorder = Recorder()
    hidden = case["x"].shape[1]
    transport = build_transport(
        kind,
        world,
        max_tokens=int(case["max_tokens"]),
        hidden=hidden,
        top_k=spec.top_k,
        slots_per_rank=placement.slots_per_rank,
        dtype=dtype,
        per_expert=invariant,
        recorder=recorder,
        on_device=bool(case["on_device"]),
        fp8=fp8,
    )
    context = MoEContext(
        rank, placement, transport, recorder, products.matmul, invariant, device, dtype,
        world.board, workspace=int(case["workspace"]), fp8_experts="triton",
        apart=build_apart(kind, transport, device, recorder),
    )  # fmt: skip
    layer = build_moe_layer(spec, 1, weights, lambda x: x * 0.5, context)
    mine = np.flatnonzero(case["owner"] == rank)
    x = torch.from_numpy(case["x"][mine]).to(device, dtype)
    keys = torch.from_numpy(case["keys"][mine]).to(device)
    most = int(case["most"]) or int(max(np.bincount(case["owner"])))
    pieces = -(-most // int(case["max_tokens"]))
    overlap = str(case["overlap"])
    cut = len(mine) // 2 if overlap == "tbo" else len(mine)
    halves = [(x[:cut], keys[:cut]), (x[cut:], keys[cut:])][: 1 + (overlap == "tbo")]
    parts, yields = drive(*(layer.forward(*half, most, overlap) for half in halves))
    out = torch.cat(parts)
    assert yields == {"off": 0, "sbo": pieces, "tbo": 4 * pieces}[overlap]
    assert world.board.where(rank)[:2] == ("combine", 1)
    snapshot = recorder.snapshot()
    parts = {"router", "dispatch", "experts", "shared", "combine"}
    if not len(mine):  # an idle rank spares itself what is of no use to the others
        parts -= {"router", "shared"}
    assert parts <= set(snapshot["seconds"])
    return {
        "out": out.float().cpu().numpy(),
        "mine": mine,
        "tokens_E": np.array(snapshot["expert_tokens"][1]),
        "rows_S": np.array(snapshot["slot_tokens"][1]),
    }


def main():
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    for text in sys.argv[3:]:
        size, kind, fd, directory = text.split(":")
        if rank < int(size):
            run_case(rank, sys.argv[2], int(size), kind, int(fd), Path(directory))


def run_case(rank, device, size, kind, fd, directory):
    fds = {"shm": fd} if fd >= 0 else {}
    world = build_world(rank, size, device, kind, fds, str(directory / "store"), 60.0)
    with np.load(directory / "case.npz") as loaded:
        case = dict(loaded)
    dtype = getattr(torch, str(case["dtype"]))
    with torch.inference_mode():
        result = run(case, rank, world, kind, bool(case["invariant"]), dtype)
    np.savez(directory / f"out{rank}.npz", **result)


def end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


main()
