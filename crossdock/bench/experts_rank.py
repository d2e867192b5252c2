"""A rank of `bench experts`: every GPU does the same products; started by `python -m`."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossdock.bench.child import answer_requests
from crossdock.bench.meter import CudaMeter, HostMeter, Meter, clock_while, work_of
from crossdock.bench.rank_world import join
from crossdock.bench.stats import percentile
from crossdock.comm import World
from crossdock.core import CrossdockError
from crossdock.kernels.grouped_gemm import ALIGN, Segments, segments_of
from crossdock.kernels.grouped_gemm_bf16 import grouped_bf16, grouped_torch
from crossdock.kernels.grouped_gemm_fp8 import grouped_gemm_fp8, is_hopper, masked_gemm_fp8
from crossdock.kernels.masked_gemm_bf16 import masked_gemm_bf16
from crossdock.kernels.quant import (
    dequantise_rows,
    dequantise_weights,
    quantise_rows,
    quantise_weights,
)

OURS = "FP8, own kernel"
CAPACITY = 256
"""Places of a slot in masked layout, or more where a slot has more rows."""
CLOCKED_US = 7e5
"""For how long products are repeated while the clock is read, which is a mean over 0.2 to 1 s."""
MOST_ERROR = 1e-2
"""Norm of the difference to fp32 over fp32's: BF16 outputs alone are off by some 2e-3."""


@dataclass(frozen=True, eq=False)
class Rank:
    world: World
    meter: Meter


@dataclass(frozen=True, eq=False)
class Weights:
    w_SOI: Tensor
    q_SOI: Tensor
    scale_SAB: Tensor


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    world = join(settings)
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else ""
    return Rank(world, CudaMeter(world) if on_gpu else HostMeter(world)), {"device": name}


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Checks, then times one shape: `{"times": [(who, {kind: [us]})], "clocks": {who: MHz}}`."""
    torch.manual_seed(request["seed"] + rank.world.rank)
    slots, rows, width, out = (request[key] for key in ("slots", "rows", "width", "out"))
    device = rank.world.device
    weights = _weights(slots, out, width, device)
    layout = _grouped if request["layout"] == "grouped" else _masked
    products = layout(weights, rows)
    works = {}
    for who, (product, check) in products.items():
        check(product())
        works[who] = work_of(product)
    times = rank.meter.measure(works, request["turns"], request["reps"])
    clocks = {}
    if isinstance(rank.meter, CudaMeter):
        product, us = products[OURS][0], percentile(times[OURS]["eager"], 50)
        clocks[OURS] = clock_while(product, int(CLOCKED_US / us))
    return {"times": list(times.items()), "clocks": clocks}


Product = Callable[[], Tensor]
Check = Callable[[Tensor], None]


def _weights(slots: int, out: int, width: int, device: torch.device) -> Weights:
    w_SOI = torch.empty(slots, out, width, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    return Weights(w_SOI, *quantise_weights(w_SOI))


def _grouped(weights: Weights, rows: int) -> dict[str, tuple[Product, Check]]:
    """Slots of `rows` rows each, in aligned segments."""
    slots, _, width = weights.w_SOI.shape
    device, padded = weights.w_SOI.device, -(-rows // ALIGN) * ALIGN
    counts_S = torch.full((slots,), rows, dtype=torch.int32, device=device)
    x_NI = torch.randn(slots * padded, width, device=device).bfloat16()
    q_NI, scale_NB = quantise_rows(x_NI)
    segments = segments_of(counts_S, slots * padded)
    fp8 = _check_of(dequantise_rows(q_NI, scale_NB).view(slots, padded, -1), weights, rows, True)
    bf16 = _check_of(x_NI.view(slots, padded, -1), weights, rows, False)
    products: dict[str, tuple[Product, Check]] = {
        OURS: (
            lambda: grouped_gemm_fp8(q_NI, scale_NB, weights.q_SOI, weights.scale_SAB, segments),
            fp8,
        ),
        "BF16, torch._grouped_mm": (
            lambda: grouped_torch(x_NI, weights.w_SOI, segments),
            bf16,
        ),
    }
    if is_hopper(x_NI):
        products["BF16, own kernel"] = lambda: grouped_bf16(x_NI, weights.w_SOI, segments), bf16
    if _has_deep_gemm(device):
        products |= _deep_grouped(q_NI, scale_NB, weights, segments, fp8)
    return products


def _masked(weights: Weights, rows: int) -> dict[str, tuple[Product, Check]]:
    """Slots of `rows` rows each, of CAPACITY places."""
    slots, _, width = weights.w_SOI.shape
    device, capacity = weights.w_SOI.device, max(CAPACITY, rows)
    counts_S = torch.full((slots,), rows, dtype=torch.int32, device=device)
    x_SCI = torch.randn(slots, capacity, width, device=device).bfloat16()
    q, scale = quantise_rows(x_SCI.flatten(0, 1))
    q_SCI, scale_SCB = q.view(slots, capacity, -1), scale.view(slots, capacity, -1)
    fp8 = _check_of(dequantise_rows(q_SCI, scale_SCB), weights, rows, True)
    bf16 = _check_of(x_SCI, weights, rows, False)
    dense_NI = x_SCI[:, :rows].flatten(0, 1).contiguous()
    dense = _check_of(dense_NI.view(slots, rows, -1), weights, rows, False)
    ends_S = counts_S.cumsum(0, dtype=torch.int32)
    products: dict[str, tuple[Product, Check]] = {
        OURS: (
            lambda: masked_gemm_fp8(
                q_SCI, scale_SCB, weights.q_SOI, weights.scale_SAB, counts_S, rows
            ),
            fp8,
        ),
        "BF16, own kernel": (
            lambda: masked_gemm_bf16(x_SCI, weights.w_SOI, counts_S, rows),
            bf16,
        ),
        "BF16, torch._grouped_mm": (
            lambda: torch._grouped_mm(dense_NI, weights.w_SOI.transpose(1, 2), offs=ends_S),
            dense,
        ),
    }
    if _has_deep_gemm(device):
        products |= _deep_masked(q_SCI, scale_SCB, weights, counts_S, rows, fp8)
    return products


def _has_deep_gemm(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("deep_gemm") is not None


def _deep_grouped(
    q_NI: Tensor, scale_NB: Tensor, weights: Weights, segments: Segments, check: Check
) -> dict[str, tuple[Product, Check]]:
    """Scales as they come, row by row, and in the order that DeepGEMM wants."""
    import deep_gemm

    slots_N = segments.tile_slots_M.repeat_interleave(ALIGN)
    w = weights.q_SOI, weights.scale_SAB

    def product(scale: Tensor) -> Product:
        def run() -> Tensor:
            out = q_NI.new_empty(len(q_NI), weights.q_SOI.shape[1], dtype=torch.bfloat16)
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (q_NI, scale), w, out, slots_N, disable_ue8m0_cast=True
            )
            return out

        return run

    ready = deep_gemm.get_mn_major_tma_aligned_tensor(scale_NB)
    return {
        "FP8, DeepGEMM": (product(ready), check),
        "FP8, DeepGEMM, scales by row": (product(scale_NB), check),
    }


def _deep_masked(
    q_SCI: Tensor, scale_SCB: Tensor, weights: Weights, counts_S: Tensor, rows: int, check: Check
) -> dict[str, tuple[Product, Check]]:
    import deep_gemm

    w = weights.q_SOI, weights.scale_SAB

    def product(scale: Tensor) -> Product:
        def run() -> Tensor:
            shape = (*q_SCI.shape[:2], weights.q_SOI.shape[1])
            out = q_SCI.new_empty(shape, dtype=torch.bfloat16)
            deep_gemm.fp8_m_grouped_gemm_nt_masked(
                (q_SCI, scale), w, out, counts_S, rows, disable_ue8m0_cast=True
            )
            return out

        return run

    ready = deep_gemm.get_mn_major_tma_aligned_tensor(scale_SCB)
    return {
        "FP8, DeepGEMM": (product(ready), check),
        "FP8, DeepGEMM, scales by row": (product(scale_SCB), check),
    }


def _check_of(x_SCI: Tensor, weights: Weights, rows: int, fp8: bool) -> Check:
    """Compares slot after slot with fp32."""

    def check(out: Tensor) -> None:
        slots = len(x_SCI)
        out_SCO = out.view(slots, -1, out.shape[-1])
        for s in range(slots):
            w_OI = weights.w_SOI[s].float()
            if fp8:
                w_OI = dequantise_weights(weights.q_SOI[s], weights.scale_SAB[s])
            want = x_SCI[s, :rows].float() @ w_OI.T
            error = (out_SCO[s, :rows].float() - want).norm() / want.norm()
            if not float(error) < MOST_ERROR:
                raise CrossdockError(
                    f"slot {s} differs from fp32 by {float(error):.3g} of its norm, "
                    f"expected less than {MOST_ERROR}"
                )

    return check


def stop(rank: Rank) -> None:
    pass


if __name__ == "__main__":
    answer_requests(start, run, stop)
