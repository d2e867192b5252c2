"""One MoE layer: route -> dispatch -> permute -> experts -> unpermute -> combine."""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from crossdock.core import MoESpec, OverlapMode, Placement, Received, Routing
from crossdock.core.protocols import Ticket
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
        self._apart = context.apart or context.transport
        self._board = context.board

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """The experts' weights, [S, ...] each; see `Experts`."""
        return self.experts.slot_tensors

    def place(self, placement: Placement) -> None:
        """Between steps: tokens go to the slots of `placement` from now on."""
        self.router.place(placement)

    def router_bias(self) -> tuple[Tensor, Tensor]:
        """See `core.SlotLayer`."""
        assert self.router.bias_E is not None
        return self.router.tokens_E, self.router.bias_E

    def forward(
        self,
        x_TH: Tensor,
        keys_T: Tensor,
        most_tokens: int | None = None,
        overlap: OverlapMode = "sbo",
        rows_1: Tensor | None = None,
    ) -> Generator[None, None, Tensor]:
        """[T, H]; T may be 0. Yields with a dispatch in flight ("sbo", where there is a shared
        expert to run meanwhile; "tbo") and with a combine in flight ("tbo"): once, or as often as
        the tokens of the rank that has most exceed what the transport takes at once.

        Args:
            keys_T: int64, a hash of (request, position).
            most_tokens: of any rank in this step, the same on all of them; None: at most what the
                transport takes.
            overlap: the same on all ranks.
            rows_1: int32 on a GPU; rows from there on go to no expert.
        """
        step = self._transport.max_tokens
        if step is None or most_tokens is None or most_tokens <= step:
            return (yield from self._exchange(x_TH, keys_T, most_tokens, overlap, rows_1))
        parts = []
        for start in range(0, most_tokens, step):
            piece = slice(start, start + step)  # a rank with fewer tokens runs out of them
            most = min(step, most_tokens - start)
            rows = None if rows_1 is None else rows_1 - start
            parts.append(
                (yield from self._exchange(x_TH[piece], keys_T[piece], most, overlap, rows))
            )
        return torch.cat(parts)

    def _exchange(
        self,
        x_TH: Tensor,
        keys_T: Tensor,
        most_tokens: int | None,
        overlap: OverlapMode,
        rows_1: Tensor | None,
    ) -> Generator[None, None, Tensor]:
        span, board, transport = self._recorder.span, self._board, self._transport
        idle = x_TH.shape[0] == 0  # such a rank makes the others wait for all it does
        with span("router"):
            if self.router.gathers:
                board.enter("counts", self._index)
            routing = self.router.nothing() if idle else self.router(x_TH, keys_T, rows_1)
        board.enter("dispatch", self._index)
        shared_TH = None
        if overlap == "tbo" or (overlap == "sbo" and self.shared is not None):
            received, ticket, shared_TH = yield from self._dispatch_apart(
                x_TH, routing, most_tokens
            )
        else:
            with span("dispatch"):
                received, ticket = transport.dispatch(x_TH, routing, most_tokens)
        board.enter("experts", self._index)
        with span("experts"):
            y = self.experts(received)
        board.enter("combine", self._index)
        if overlap == "tbo":
            combine = span("combine", pieces=2)
            with combine:
                pending = self._apart.combine_begin(y, ticket)
            yield
            board.enter("combine", self._index)
            with combine:
                out_TH = self._apart.combine_end(pending)
        else:
            with span("combine"):
                out_TH = transport.combine(y, ticket)
        if shared_TH is None and not idle:
            shared_TH = self._share(x_TH)
        return out_TH if shared_TH is None else out_TH + shared_TH

    def _dispatch_apart(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None
    ) -> Generator[None, None, tuple[Received, Ticket, Tensor | None]]:
        """With the output of the shared expert, if there is one and any token."""
        dispatch = self._recorder.span("dispatch", pieces=2)
        with dispatch:
            pending = self._apart.dispatch_begin(x_TH, routing, most_tokens)
        yield
        shared_TH = self._share(x_TH) if x_TH.shape[0] else None
        self._board.enter("dispatch", self._index)
        with dispatch:
            received, ticket = self._apart.dispatch_end(pending)
        return received, ticket, shared_TH

    def _share(self, x_TH: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        with self._recorder.span("shared"):
            return self.shared(x_TH)


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
