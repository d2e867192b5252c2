"""The rank of `bench attention`; started by `python -m`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossdock.bench.attention import COPY, FP8, LATENT, ROTATED, Shape
from crossdock.bench.attention_case import Given, draw, quantised, reference
from crossdock.bench.child import answer_requests
from crossdock.bench.meter import CudaMeter, HostMeter, Meter, Work, work_of
from crossdock.bench.rank_world import join
from crossdock.comm import World
from crossdock.core import CrossdockError, RopeSpec
from crossdock.kernels.attention_gqa import decode_gqa
from crossdock.kernels.attention_mla import decode_mla
from crossdock.kernels.attention_prefill import prefill_mla
from crossdock.kernels.attention_split import split_queries
from crossdock.layers import Rope
from crossdock.layers.attention.flashinfer_library import (
    AttentionCase,
    load_flashinfer,
    why_not_flashinfer,
)
from crossdock.layers.attention.paged_gqa import attend_prompts
from crossdock.layers.attention.paged_plan import PagedPlanner

TRITON, FLASHINFER = "Triton", "FlashInfer"
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
"""Read by the copy, and as many written, by device."""
MOST_ERROR = {TRITON: 2e-2, FLASHINFER: 2e-2, FP8: 1e-1}
"""Of any row, norm of the difference to float32 over float32's. BF16 outputs are off by some 2e-3,
those over a cache in E4M3 by 2e-2 to 4e-2."""

Product = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Rank:
    world: World
    meter: Meter


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    world = join(settings)
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else ""
    meter = CudaMeter(world) if on_gpu else HostMeter(world)
    return Rank(world, meter), {"device": name, "copied": 2 * COPY_BYTES[world.device.type]}


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Checks, then times one shape; the fields of `attention.Measured`."""
    turns, reps, page_size = (request.pop(key) for key in ("turns", "reps", "page_size"))
    shape, device = Shape(**request), rank.world.device
    torch.manual_seed(1)
    given = draw(shape, page_size, device)
    products, laid_out = {}, {}
    products[TRITON], laid_out[TRITON] = _on_triton(given)
    refused = _why_not_flashinfer(given)
    if not refused:
        products[FLASHINFER], laid_out[FLASHINFER] = _on_flashinfer(given)
    if shape.rows == "decode" or shape.kv_heads:
        products[FP8], laid_out[FP8] = _on_triton(quantised(given))
    wanted = reference(given)
    errors = {who: _error(who, product(), wanted) for who, product in products.items()}
    del wanted
    works = {who: work_of(product) for who, product in products.items()}
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not in a graph: captured, it reached 2.7 TB/s on an H200 where it reaches 4.3 otherwise.
    works[COPY] = Work(lambda i: target.copy_(source), graph=False)
    return {
        "times": list(rank.meter.measure(works, turns, reps).items()),
        "errors": errors,
        "laid_out_us": laid_out,
        "refused": {FLASHINFER: refused} if refused else {},
    }


def _on_triton(given: Given) -> tuple[Product, float]:
    """And the host's us before it."""
    (q, *turned), cache, scales = given.q, given.cache, given.scales
    scale, page, decodes = given.scale, given.page_size, given.shape.rows == "decode"
    planner = PagedPlanner(given.shape.spec, _rope(given.device), given.device, bool(scales))
    p, us = _planned(given, planner)
    if given.shape.kv_heads:
        if not decodes:
            return (lambda: attend_prompts(q, cache, p, scale, page, None)), us
        (k, v), pair = cache[:2], (scales[0], scales[1]) if scales else None
        paged = (p.table_BP, p.lens_B, p.split, scale, page, None, pair)
        return (lambda: decode_gqa(q, k, v, *paged)), us
    if decodes:
        latent = (p.table_BP, p.lens_B, p.split, scale, page, scales[0] if scales else None)
        return (lambda: decode_mla(q, turned[0], cache[0], *latent)), us
    k, v, keys = cache
    cu_B1 = given.batch.prefill_starts_B1
    assert cu_B1 is not None
    split = split_queries(cu_B1, len(q), planner.tile)  # all at once: the keys are there
    expanded = (cu_B1, cu_B1, given.batch.kv_lens_B, split, scale)
    return (lambda: prefill_mla(q, turned[0], k, v, keys, *expanded)), us


def _on_flashinfer(given: Given) -> tuple[Product, float]:
    from crossdock.layers.attention.flashinfer_plan import FlashInferPlanner

    q, cache = given.q, [x.view(-1, given.page_size, *x.shape[1:]) for x in given.cache]
    planner = FlashInferPlanner(
        load_flashinfer(), _case(given), _rope(given.device), given.device, q[0].dtype
    )
    p, us = _planned(given, planner)
    if given.shape.rows == "prompt":
        return partial(p.run, q[0], tuple(cache), out=torch.empty_like(q[0])), us
    return partial(p.run, *q, *cache[0].split((LATENT, ROTATED), dim=-1)), us


def _why_not_flashinfer(given: Given) -> str | None:
    """As the engine has it, FlashInfer does decodes of MLA and prompts of GQA."""
    if (given.shape.rows == "decode") is bool(given.shape.kv_heads):
        return f"the engine leaves these {given.shape.rows}s to Triton's kernels"
    if given.device.type != "cuda":
        return "its kernels need a GPU"
    return why_not_flashinfer(_case(given), given.device, given.q[0].dtype)


def _case(given: Given) -> AttentionCase:
    return AttentionCase(given.shape.spec, given.scale, fp8_cache=False)


def _rope(device: torch.device) -> Rope:
    """Planners pass it on."""
    return Rope(RopeSpec(ROTATED, 1e4), 1, device=device)


def _planned(given: Given, planner: PagedPlanner) -> tuple[Any, float]:
    """What the plan has for the rows, and the us that the second of two took the host."""
    planner(given.batch, given.page_size)
    begin = time.perf_counter()
    plan = planner(given.batch, given.page_size)
    us = 1e6 * (time.perf_counter() - begin)
    return plan.decode or plan.prefill, us


def _error(who: str, out: Tensor, wanted: Tensor) -> float:
    """Of all rows, after a look at each."""
    off_T, norm_T = (x.flatten(1).norm(dim=1) for x in (out.float() - wanted, wanted))
    worst = float((off_T / norm_T).max())
    if not worst < MOST_ERROR[who]:
        raise CrossdockError(
            f"{who}: row {int((off_T / norm_T).argmax())} differs from float32 by {worst:.3g} of "
            f"its norm, expected less than {MOST_ERROR[who]}"
        )
    return float(off_T.norm() / norm_T.norm())


def stop(rank: Rank) -> None:
    pass


if __name__ == "__main__":
    answer_requests(start, run, stop)
