"""One MoE layer: route -> dispatch -> permute -> experts -> unpermute -> combine."""

import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from crossdock.core import MoESpec, Received, Routing
from crossdock.moe.context import MoEContext, MoEWeights
from crossdock.moe.experts import build_experts
from crossdock.moe.permute import permute, unpermute, unpermute_per_expert
from crossdock.moe.router import Router

_WORKSPACE_BYTES = 256 << 20
"""What the experts may hold at once; more received rows are worked on in pieces."""


class MoELayer:
    def __init__(
        self,
        spec: MoESpec,
        index: int,
        weights: MoEWeights,
        shared: Callable[[Tensor], Tensor] | None,
        context: MoEContext,
    ):
        self.router = Router(spec, index, weights, context)
        self.experts = build_experts(weights, context)
        self.shared, self._index = shared, index
        self._transport, self._recorder = context.transport, context.recorder
        self._board, self._rows_S = context.board, context.load.rows_LS[index]
        # Per (row, k): the row, the gate and up halves, their product, the output, and fp32 sums.
        H, F, itemsize = weights.down_SHF.shape[1], spec.intermediate_size, context.dtype.itemsize
        entry_bytes = (2 * H + 3 * F) * itemsize + 4 * H
        self._nothing = Routing(
            torch.empty(0, spec.top_k, dtype=torch.int64, device=context.device),
            torch.empty(0, spec.top_k, device=context.device),
        )
        self._rows_at_once = max(1, _WORKSPACE_BYTES // (spec.top_k * entry_bytes))

    def forward(self, x_TH: Tensor, keys_T: Tensor) -> Generator[None, None, Tensor]:
        """[T, H]; T may be 0. Yields once, with the dispatch in flight.

        Args:
            keys_T: int64, a hash of (request, position).
        """
        clock, observe, transport = time.perf_counter, self._recorder.observe, self._transport
        t0 = clock()
        idle = x_TH.shape[0] == 0  # such a rank makes the others wait for all it does
        routing = self._nothing if idle else self.router(x_TH, keys_T)
        t1 = clock()
        observe("router", t1 - t0)
        self._board.enter("dispatch", self._index)
        pending = transport.dispatch_begin(x_TH, routing)
        begun = clock() - t1
        yield
        shared_TH = None
        if self.shared is not None and not idle:
            t2 = clock()
            shared_TH = self.shared(x_TH)
            observe("shared", clock() - t2)
        t3 = clock()
        received, ticket = transport.dispatch_end(pending)
        t4 = clock()
        observe("dispatch", begun + t4 - t3)
        self._board.enter("experts", self._index)
        y = self._run(received)
        t5 = clock()
        observe("experts", t5 - t4)
        self._board.enter("combine", self._index)
        out_TH = transport.combine_end(transport.combine_begin(y, ticket))
        observe("combine", clock() - t5)
        return out_TH if shared_TH is None else out_TH + shared_TH

    def _run(self, received: Received) -> Tensor:
        """permute -> experts -> unpermute, in pieces where there are very many rows."""
        N, step = received.x_NH.shape[0], self._rows_at_once
        if N == 0:
            shape = received.slots_NK.shape if self._transport.per_expert else (0,)
            return received.x_NH.view(*shape, received.x_NH.shape[1])
        if step >= N:
            return self._run_piece(received)
        parts = zip(
            received.x_NH.split(step),
            received.slots_NK.split(step),
            received.weights_NK.split(step),
            strict=True,
        )
        return torch.cat([self._run_piece(Received("rows", *part)) for part in parts])

    def _run_piece(self, received: Received) -> Tensor:
        permuted = permute(received, self._rows_S.shape[0])
        self._rows_S.add_(permuted.counts_S)
        out_MH = self.experts(permuted)
        restore = unpermute_per_expert if self._transport.per_expert else unpermute
        return restore(out_MH, permuted, received)


def build_moe_layer(
    spec: MoESpec,
    index: int,
    weights: MoEWeights,
    shared: Callable[[Tensor], Tensor] | None,
    context: MoEContext,
) -> MoELayer:
    """
    Args:
        index: among the MoE layers, as in `Placement`.
        shared: the shared expert, [T, H] to [T, H]; runs while rows are on the way.

    Raises:
        ValueError: weights whose shapes do not fit spec or placement.
    """
    E, S, F = spec.num_experts, context.placement.slots_per_rank, spec.intermediate_size
    H = weights.router_EH.shape[1]
    for name, tensor, shape in (
        ("router", weights.router_EH, (E, H)),
        ("gate_up", weights.gate_up_SFH, (S, 2 * F, H)),
        ("down", weights.down_SHF, (S, H, F)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"MoE layer {index}: {name} is {tuple(tensor.shape)}, not {shape}")
    return MoELayer(spec, index, weights, shared, context)
