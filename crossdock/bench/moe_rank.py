"""A rank of `bench moe`: one whole MoE layer over the nvlink transport; started by `python -m`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdock.bench.child import answer_requests
from crossdock.bench.comm_nccl import link_copy
from crossdock.bench.meter import CudaMeter, HostMeter, Meter, Work, work_of
from crossdock.bench.moe_check import check_layer
from crossdock.bench.moe_parts import parts_of, profile
from crossdock.bench.rank_world import join
from crossdock.comm import World, build_transport
from crossdock.core import EngineConfig, MoESpec, Placement, Transport
from crossdock.engine.memory import expert_workspace
from crossdock.kernels.quant import FP8, quantise_weights
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoELayer, MoEWeights, build_moe_layer


@dataclass(frozen=True, eq=False)
class Rank:
    world: World
    meter: Meter
    copy: Work | None


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    world = join(settings)
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else ""
    meter: Meter = CudaMeter(world) if on_gpu else HostMeter(world)
    copy = link_copy(world) if on_gpu and world.size > 1 else None
    return Rank(world, meter, copy), {"device": name}


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Checks, then times a layer with each library of `libraries`."""
    world, tokens, hidden = rank.world, request["tokens"], request["hidden"]
    torch.manual_seed(request["seed"])
    spec = MoESpec(**request["spec"])
    # Scores must not saturate: those of equal experts would choose the first ones.
    router_EH = torch.randn(spec.num_experts, hidden, device=world.device) * hidden**-0.5
    router_EH = router_EH.bfloat16().float()  # as checkpoints store it
    torch.manual_seed(request["seed"] + 1 + world.rank)
    weights = _weights(spec, router_EH, spec.num_experts // world.size, request["fp8"])
    transport = build_transport(
        "nvlink", world, max_tokens=tokens, hidden=hidden, top_k=spec.top_k,
        slots_per_rank=len(weights.down_SHF), dtype=torch.bfloat16, per_expert=False,
        recorder=Recorder(), on_device=True, fp8=request["fp8"],
    )  # fmt: skip
    x_TH = torch.randn(tokens, hidden, device=world.device).bfloat16()
    keys_T = torch.arange(tokens, device=world.device)
    runs: dict[str, Callable[[], Tensor]] = {}
    facts: dict[str, Any] = {}
    for library in request["libraries"]:
        context = _context(world, spec, transport, library)
        layer = build_moe_layer(spec, 0, weights, None, context)
        runs[library] = _forward(layer, x_TH, keys_T)
        out_TH = runs[library]()
        facts["rows"] = int(context.load.rows_LS.sum())
        routing = layer.router(x_TH, keys_T)
        check_layer(out_TH, x_TH, routing, weights, world, tokens)
        target_TK = routing.slots_TK // len(weights.down_SHF)
        facts["rows_out"] = [int((target_TK == r).any(1).sum()) for r in range(world.size)]
    works = {library: work_of(go) for library, go in runs.items()}
    if rank.copy is not None:
        works["copy"] = rank.copy
    turns, reps = request["turns"], request["reps"]
    times = rank.meter.measure(works, turns, reps)
    parts = {}
    if isinstance(rank.meter, CudaMeter):
        for library in runs:
            graph = rank.meter.capture(works[library].run, reps)
            graph.replay()
            world.lockstep.exchange([0])
            parts[library] = parts_of(profile(graph.replay))
    sizes = [weights.gate_up_SFH, weights.down_SHF]
    sizes += [w for w in (weights.gate_up_scale_SAB, weights.down_scale_SAB) if w is not None]
    facts["weight_bytes"] = sum(w.numel() * w.element_size() for w in sizes)
    return {"times": times, "parts": parts, **facts}


def _context(world: World, spec: MoESpec, transport: Transport, library: str) -> MoEContext:
    placement = Placement(0, np.arange(spec.num_experts)[None], spec.num_experts, world.size)
    matmul = choose_products(False, world.device, torch.bfloat16).matmul
    workspace = expert_workspace(EngineConfig(""), world.device)
    return MoEContext(
        world.rank, placement, transport, Recorder(), matmul, False, world.device, torch.bfloat16,
        workspace=workspace, fp8_experts="deepgemm" if library == "deepgemm" else "triton",
    )  # fmt: skip


def _forward(layer: MoELayer, x_TH: Tensor, keys_T: Tensor) -> Callable[[], Tensor]:
    def go() -> Tensor:
        steps = layer.forward(x_TH, keys_T, len(x_TH))
        try:
            while True:
                next(steps)
        except StopIteration as end:
            out_TH: Tensor = end.value
            return out_TH

    return go


def _weights(spec: MoESpec, router_EH: Tensor, slots: int, fp8: bool) -> MoEWeights:
    """Such that values keep their size through the layer; biases of the router are 0."""
    hidden, width, device = router_EH.shape[1], spec.intermediate_size, router_EH.device
    bias_E = torch.zeros(spec.num_experts, device=device)
    shapes = ((slots, 2 * width, hidden), (slots, hidden, width))
    if not fp8:
        parts = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, shape[2] ** -0.5)
            for shape in shapes
        ]
        return MoEWeights(router_EH, bias_E, *parts)
    codes, scales = [], []
    for shape in shapes:
        q = torch.empty(shape, dtype=FP8, device=device)
        scale = torch.empty(slots, shape[1] // 128, shape[2] // 128, device=device)
        for s in range(slots):  # all in BF16 beside it might not fit
            w = torch.randn(1, *shape[1:], device=device) * shape[2] ** -0.5
            q[s : s + 1], scale[s : s + 1] = quantise_weights(w)
        codes.append(q)
        scales.append(scale)
    return MoEWeights(router_EH, bias_E, *codes, *scales)


def stop(rank: Rank) -> None:
    pass


if __name__ == "__main__":
    answer_requests(start, run, stop)
