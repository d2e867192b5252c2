"""Launches of the kernels of dispatch."""

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.handles import Arrived, Masked, Segments
from crossdock.comm.nvlink.state import DISPATCH, NARROW, ExchangeState
from crossdock.core import CapacityError, CrossdockError
from crossdock.kernels.dispatch import (
    SPAN,
    dispatch_fused,
    dispatch_masked,
    dispatch_rows,
    dispatch_send,
)
from crossdock.kernels.segments import place_rows

_WARPS, _NARROW_WARPS, _MASKED_WARPS = 8, 4, 4
_FP8_WARPS, _FP8_REGISTERS = 16, 64
"""Of what pushes FP8 rows: of wider programs a multiprocessor holds as many, so more warps."""
_PLACE_BLOCK = 512

Step = tuple[Tensor, Tensor, Tensor]
"""x [T, H], slots int64 and weights fp32 [T, K]."""


def send(state: ExchangeState, at: int, step: Step) -> None:
    arguments, senders = _sending(state, at, step)
    layout = state.layout
    dispatch_send[(1 + senders,)](
        *arguments, state.error, state.mirror,
        CHUNK=layout.chunk, GROUPS=state.groups, FP8=layout.fp8, R_MAX=state.ranks_bound,
        INTERPRET=state.interpret, **_resources(state),
    )  # fmt: skip


def rows(state: ExchangeState, at: int, step: Step | None = None) -> Arrived:
    """Waits for rows; with a step also sends them, in one launch."""
    layout, device = state.layout, state.device
    N, K = layout.cells, layout.top_k
    slots_NK = torch.empty(N, K, dtype=torch.int64, device=device)
    weights_NK = torch.empty(N, K, dtype=torch.float32, device=device)
    counts_S, tokens_R = state.counters[at, 0], state.tokens_R[at]
    staged = state.staged(at)
    receivers = state.grid(layout.ranks * -(-layout.units // SPAN))
    if step is not None:
        _fused(state, at, step, receivers, staged, (slots_NK, weights_NK), None)
    else:
        dispatch_rows[(receivers,)](
            *state.words(at, DISPATCH), state.records(at), state.epochs[at, DISPATCH], slots_NK,
            weights_NK, tokens_R, counts_S, layout.top_k, layout.ranks, state.rank,
            layout.max_tokens, layout.units, *state.giving_up,
            CHUNK=layout.chunk, INTERPRET=state.interpret, num_warps=_WARPS,
        )  # fmt: skip
    return Arrived(*staged, slots_NK, weights_NK, tokens_R, counts_S)


def masked(
    state: ExchangeState, at: int, x: Tensor, scales: Tensor | None, step: Step | None = None
) -> Masked:
    """Waits for rows and copies them to their slots; with a step also sends them, in one launch."""
    _check_room(state, x, scales)
    layout = state.layout
    places, weights = state.places[at], state.weights[at]
    counts_S, tokens_R = state.counters[at, 0], state.tokens_R[at]
    staged = state.staged(at)
    receivers = state.grid(layout.cells)
    if step is not None:
        _fused(state, at, step, receivers, staged, (places, weights), (x, scales))
    else:
        dispatch_masked[(receivers,)](
            *state.words(at, DISPATCH), state.records(at), staged[0], state.or_spare(staged[1]),
            state.epochs[at, DISPATCH], places, weights, tokens_R, counts_S, x,
            state.or_spare(scales), layout.hidden, layout.ranks, state.rank, layout.max_tokens,
            layout.units, x.shape[1], *state.giving_up,
            GROUPS=state.groups, FP8=layout.fp8, TOP=triton.next_power_of_2(layout.top_k),
            INTERPRET=state.interpret, num_warps=_MASKED_WARPS,
        )  # fmt: skip
    return Masked(x, scales, counts_S, tokens_R, places, weights)


def place(state: ExchangeState, at: int, arrived: Arrived, alignment: int) -> Segments:
    entries = arrived.slots_NK.numel()
    capacity = -(-(entries + state.slots * (alignment - 1)) // alignment) * alignment
    sizes = ((state.slots + 1,), (capacity,), tuple(arrived.slots_NK.shape))
    offsets, rows, places_NK = (
        torch.empty(size, dtype=torch.int32, device=state.device) for size in sizes
    )
    place_rows[(state.grid(-(-entries // _PLACE_BLOCK)),)](
        arrived.slots_NK, arrived.counts_S, state.counters[at, 1], offsets, rows, places_NK,
        entries, arrived.slots_NK.shape[1], state.slots, capacity, alignment,
        S_MAX=max(2, triton.next_power_of_2(state.slots)), BLOCK=_PLACE_BLOCK, num_warps=4,
    )  # fmt: skip
    return Segments(offsets, rows, places_NK)


def _fused(
    state: ExchangeState,
    at: int,
    step: Step,
    receivers: int,
    staged: tuple[Tensor, Tensor | None],
    found: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor | None] | None,
) -> None:
    """out: where masked rows go; None: rows stay in the staging."""
    layout = state.layout
    arguments, senders = _sending(state, at, step)
    x, scales = out or (staged[0], None)
    resources = {"num_warps": _MASKED_WARPS} if out else _resources(state)
    dispatch_fused[(1 + senders + receivers,)](
        *arguments, senders, *state.words(at, DISPATCH), state.records(at), staged[0],
        state.or_spare(staged[1]), *found, state.tokens_R[at], x, state.or_spare(scales),
        x.shape[1] if out else 0, *state.giving_up,
        CHUNK=layout.chunk, GROUPS=state.groups, FP8=layout.fp8, MASKED=out is not None,
        TOP=triton.next_power_of_2(layout.top_k), R_MAX=state.ranks_bound,
        INTERPRET=state.interpret, **resources, **state.early,
    )  # fmt: skip


def _sending(state: ExchangeState, at: int, step: Step) -> tuple[tuple[object, ...], int]:
    """Arguments of the sending half and how many programs it has."""
    state.check()
    x_TH, slots_TK, weights_TK = step
    layout, tokens = state.layout, x_TH.shape[0]
    state.expect_routing(tokens, slots_TK, weights_TK)
    state.expect("x", x_TH, (tokens, layout.hidden), state.dtype)
    start, counters = at * layout.set_bytes, state.counters[at]
    arguments = (
        x_TH, slots_TK, weights_TK, state.buffer.table, state.epochs[at, DISPATCH],
        state.sent[DISPATCH], counters, counters.numel(),
        tokens, layout.hidden, layout.top_k, state.slots, layout.ranks, state.rank,
        layout.max_tokens, layout.units,
        start + layout.counts(DISPATCH), start + layout.flags(DISPATCH),
        start + layout.records, start + layout.rows, start + layout.scales,
    )  # fmt: skip
    return arguments, state.grid(-(-tokens // layout.chunk))


def _check_room(state: ExchangeState, x: Tensor, scales: Tensor | None) -> None:
    layout = state.layout
    if not layout.low_latency or x.shape[1] < layout.cells:
        raise CapacityError(
            f"masked rows need at most {layout.low_latency_tokens} tokens per rank and "
            f"{layout.cells} places per slot, got {layout.max_tokens} and {x.shape[1]}"
        )
    shape = (state.slots, x.shape[1], layout.hidden)
    state.expect("masked rows", x, shape, torch.float8_e4m3fn if layout.fp8 else state.dtype)
    if layout.fp8 != (scales is not None):
        raise CrossdockError("FP8 rows, and they alone, come with scales")
    if scales is not None:
        state.expect("scales", scales, (*shape[:2], layout.hidden // 128), torch.float32)


def _resources(state: ExchangeState) -> dict[str, int]:
    if state.layout.fp8:
        return {"num_warps": _FP8_WARPS, "maxnreg": _FP8_REGISTERS}
    return {"num_warps": _WARPS if state.layout.hidden > NARROW else _NARROW_WARPS}
