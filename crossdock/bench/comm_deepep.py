"""DeepEP beside ours, or what has its name and interface as UCCL-EP does, wherever `import deep_ep`
works: `Buffer` of its first generation, kernels of one host."""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.bench.comm_case import CommCase, Inputs
from crossdock.bench.meter import Work
from crossdock.comm import World
from crossdock.core.staging import LOW_LATENCY_TOKENS
from crossdock.kernels.quant import quantise_rows

NVL_BYTES = 2 * 10**9
"""As DeepEP's own test of kernels of one host."""


def find_deep_ep(world: World) -> tuple[Any, str]:
    """The module, if all ranks can import it, and its version; or None and why not. Collective."""
    module, said = None, ""
    try:
        module = import_module("deep_ep")
        said = str(getattr(module, "__version__", "of unknown version"))
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    found = world.lockstep.exchange([module is not None])
    return (module if all(value for (value,) in found) else None), said


def join_default_group(world: World, rendezvous: str) -> Any:
    """DeepEP asks for a group that torch knows by name."""
    store = dist.FileStore(f"{rendezvous}.deep_ep", world.size)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    return dist.group.WORLD


class DeepEpExchange:
    def __init__(self, module: Any, version: str, group: Any, case: CommCase, inputs: Inputs):
        self._case, self._inputs, self._name = case, inputs, f"DeepEP {version}"
        self._low_latency = case.max_tokens <= LOW_LATENCY_TOKENS
        if self._low_latency:
            size = module.Buffer.get_low_latency_rdma_size_hint(
                case.max_tokens, case.hidden, case.ranks, case.experts
            )
            self._buffer = module.Buffer(
                group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=case.slots
            )
        else:
            self._buffer = module.Buffer(group, num_nvl_bytes=NVL_BYTES)

    def works(self) -> dict[tuple[str, str], Work]:
        """By who and what."""
        run = self._dispatch_low_latency if self._low_latency else self._dispatch
        rows, handle = run()
        works = {(self._name, "dispatch"): Work(lambda i: run())}
        if self._case.fp8 and not self._low_latency:
            return works  # rows come home in BF16, which the other dtype's case times
        y = torch.randn(rows.shape, device=rows.device).bfloat16()
        works[self._name, "combine"] = Work(lambda i: self._combine(y, handle))
        return works

    def _dispatch(self) -> tuple[Tensor, Any]:
        """Room for all rows, so that the host need not wait."""
        case, routing, buffer = self._case, self._inputs.routing, self._buffer
        x_TH = self._inputs.x_TH
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            routing.slots_TK, case.experts
        )
        got = buffer.dispatch(
            quantise_rows(x_TH) if case.fp8 else x_TH,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=routing.slots_TK,
            topk_weights=routing.weights_TK,
            num_worst_tokens=case.ranks * case.tokens,
        )
        return (got[0][0] if case.fp8 else got[0]), got[4]

    def _dispatch_low_latency(self) -> tuple[Tensor, Any]:
        case, routing = self._case, self._inputs.routing
        got = self._buffer.low_latency_dispatch(
            self._inputs.x_TH, routing.slots_TK, case.max_tokens, case.experts, use_fp8=case.fp8
        )
        return (got[0][0] if case.fp8 else got[0]), got[2]

    def _combine(self, y: Tensor, handle: Any) -> None:
        routing = self._inputs.routing
        if self._low_latency:
            chosen = routing.slots_TK, routing.weights_TK
            self._buffer.low_latency_combine(y, *chosen, handle)
        else:
            self._buffer.combine(y, handle)
