"""One MoE layer: route -> dispatch -> permute -> experts -> unpermute -> combine."""

import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from crossdock.core import MoESpec, Placement, Routing
from crossdock.moe.context import MoEContext, MoEWeights
from crossdock.moe.experts import build_experts
from crossdock.moe.router import Router


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
        self.experts = build_experts(weights, context, spec.top_k, context.load.rows_LS[index])
        self.shared, self._index = shared, index
        self._transport, self._recorder = context.transport, context.recorder
        self._board = context.board
        self._nothing = Routing(
            torch.empty(0, spec.top_k, dtype=torch.int64, device=context.device),
            torch.empty(0, spec.top_k, device=context.device),
        )

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """The experts' weights, [S, ...] each; see `Experts`."""
        return self.experts.slot_tensors

    def place(self, placement: Placement) -> None:
        """Between steps: tokens go to the slots of `placement` from now on."""
        self.router.slot_map.update(placement)

    def forward(
        self, x_TH: Tensor, keys_T: Tensor, most_tokens: int | None = None
    ) -> Generator[None, None, Tensor]:
        """[T, H]; T may be 0. Yields with a dispatch in flight, where there is a shared expert to
        run meanwhile: once, or as often as the tokens of the rank that has most exceed what the
        transport takes at once.

        Args:
            keys_T: int64, a hash of (request, position).
            most_tokens: of any rank in this step, the same on all of them; None: at most what the
                transport takes.
        """
        step = self._transport.max_tokens
        if step is None or most_tokens is None or most_tokens <= step:
            return (yield from self._exchange(x_TH, keys_T, most_tokens))
        parts = []
        for start in range(0, most_tokens, step):
            piece = slice(start, start + step)  # a rank with fewer tokens runs out of them
            most = min(step, most_tokens - start)
            parts.append((yield from self._exchange(x_TH[piece], keys_T[piece], most)))
        return torch.cat(parts)

    def _exchange(
        self, x_TH: Tensor, keys_T: Tensor, most_tokens: int | None
    ) -> Generator[None, None, Tensor]:
        clock, observe, transport = time.perf_counter, self._recorder.observe, self._transport
        t0 = clock()
        idle = x_TH.shape[0] == 0  # such a rank makes the others wait for all it does
        routing = self._nothing if idle else self.router(x_TH, keys_T)
        t1 = clock()
        observe("router", t1 - t0)
        self._board.enter("dispatch", self._index)
        shared_TH = None
        if self.shared is None:  # nothing to put between
            received, ticket = transport.dispatch(x_TH, routing, most_tokens)
            t4 = clock()
            observe("dispatch", t4 - t1)
        else:
            pending = transport.dispatch_begin(x_TH, routing, most_tokens)
            begun = clock() - t1
            yield
            t2 = clock()
            if not idle:
                shared_TH = self.shared(x_TH)
                observe("shared", clock() - t2)
            t3 = clock()
            received, ticket = transport.dispatch_end(pending)
            t4 = clock()
            observe("dispatch", begun + t4 - t3)
        self._board.enter("experts", self._index)
        y = self.experts(received)
        t5 = clock()
        observe("experts", t5 - t4)
        self._board.enter("combine", self._index)
        out_TH = transport.combine(y, ticket)
        observe("combine", clock() - t5)
        return out_TH if shared_TH is None else out_TH + shared_TH


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
