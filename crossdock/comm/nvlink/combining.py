"""Launches of the kernels of combine."""

from typing import Any

import torch
from torch import Tensor

from crossdock.comm.nvlink.handles import Arrived, Masked, Segments, Sending
from crossdock.comm.nvlink.state import COMBINE, ExchangeState
from crossdock.kernels.combine import (
    INDEXED,
    PER_EXPERT,
    PER_EXPERT_INDEXED,
    REDUCED,
    combine_fused,
    combine_home,
    combine_send,
)

_WARPS = 8
_RESOURCES = (
    (2048, {"UNROLL": 4, "num_warps": 2, "maxnreg": 128}),
    (4096, {"UNROLL": 2, "num_warps": 4, "maxnreg": 128}),
    (1 << 30, {"UNROLL": 2, "num_warps": _WARPS, "maxnreg": 128}),
)
"""Of what sends, by the hidden size up to which it is taken. On two H200 and at 7,168 16 warps, or
one row at a time, took as long; four rows half as long again. At 2,048, T = 8,192 the third takes
265 us and the first 182; the second has been derived from both."""


def of_rows(state: ExchangeState, y: Tensor, arrived: Arrived) -> Sending:
    layout = state.layout
    shape: tuple[int, ...] = (layout.cells, layout.hidden)
    if layout.per_expert:
        shape = (layout.cells, layout.top_k, layout.hidden)
    state.expect("y", y, shape, state.dtype)
    mode = PER_EXPERT if layout.per_expert else REDUCED
    return Sending(mode, y, arrived.slots_NK, arrived.weights_NK, arrived.tokens_R)


def of_segments(state: ExchangeState, y: Tensor, arrived: Arrived, segments: Segments) -> Sending:
    # Rows beyond the last segment are never read, so there may be fewer.
    state.expect("y", y, (y.shape[0], state.layout.hidden), state.dtype)
    places, weights = segments.places_NK, arrived.weights_NK
    return Sending(_indexed(state), y, places, weights, arrived.tokens_R)


def of_masked(state: ExchangeState, y: Tensor, masked: Masked) -> Sending:
    state.expect("y", y, tuple(masked.x.shape), state.dtype)
    return Sending(_indexed(state), y, masked.places, masked.weights, masked.tokens_R)


def send(state: ExchangeState, at: int, sending: Sending) -> None:
    state.check()
    layout = state.layout
    combine_send[(_programs(state),)](
        sending.y, sending.slots, sending.weights, sending.tokens_R, state.buffer.table,
        state.epochs[at, COMBINE], state.sent[COMBINE], layout.hidden, layout.top_k,
        sending.slots.shape[1], layout.ranks, state.rank, layout.max_tokens, layout.home_units,
        *_offsets(state, at), **_common(state, sending.mode), **_resources(state),
    )  # fmt: skip


def home(
    state: ExchangeState, at: int, slots_TK: Tensor, weights_TK: Tensor, y: Tensor | None
) -> Tensor:
    layout, tokens = state.layout, slots_TK.shape[0]
    state.expect_routing(tokens, slots_TK, weights_TK)
    rows, out_TH = state.home(at), _out(state, tokens)
    mode = PER_EXPERT if layout.per_expert else INDEXED if y is None else REDUCED
    combine_home[(state.grid(-(-tokens // layout.home_chunk)),)](
        rows, rows if y is None else y, slots_TK, weights_TK, *state.words(at, COMBINE),
        state.epochs[at, COMBINE], state.sent[COMBINE], out_TH, tokens, layout.hidden,
        layout.top_k, state.slots, layout.ranks, state.rank, layout.max_tokens, layout.home_units,
        *state.giving_up, **_common(state, mode), num_warps=_WARPS,
    )  # fmt: skip
    return out_TH


def fused(
    state: ExchangeState, at: int, sending: Sending, slots_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    state.check()
    layout, tokens = state.layout, slots_TK.shape[0]
    state.expect_routing(tokens, slots_TK, weights_TK)
    out_TH = _out(state, tokens)
    combine_fused[(_programs(state),)](
        sending.y, sending.slots, sending.weights, sending.tokens_R, state.buffer.table,
        state.epochs[at, COMBINE], state.sent[COMBINE], state.home(at), slots_TK, weights_TK,
        *state.words(at, COMBINE), out_TH, tokens, layout.hidden, layout.top_k,
        sending.slots.shape[1], state.slots, layout.ranks, state.rank, layout.max_tokens,
        layout.home_units, *_offsets(state, at), *state.giving_up,
        **_common(state, sending.mode), **_resources(state), **state.early,
    )  # fmt: skip
    return out_TH


def _resources(state: ExchangeState) -> dict[str, int]:
    return next(found for most, found in _RESOURCES if state.layout.hidden <= most)


def _indexed(state: ExchangeState) -> int:
    return PER_EXPERT_INDEXED if state.layout.per_expert else INDEXED


def _programs(state: ExchangeState) -> int:
    """Lanes of R, as many on every rank."""
    layout = state.layout
    return layout.ranks * max(1, min(layout.home_units, state.programs // layout.ranks))


def _offsets(state: ExchangeState, at: int) -> tuple[int, int, int]:
    layout, start = state.layout, at * state.layout.set_bytes
    counts, flags = layout.counts(COMBINE), layout.flags(COMBINE)
    return start + counts, start + flags, start + layout.home


def _out(state: ExchangeState, tokens: int) -> Tensor:
    return torch.empty(tokens, state.layout.hidden, dtype=state.dtype, device=state.device)


def _common(state: ExchangeState, mode: int) -> dict[str, Any]:
    # Products and sums are rounded one by one, as the other transports do.
    return {
        "CHUNK": state.layout.home_chunk, "BLOCK": state.groups * 128, "MODE": mode,
        "R_MAX": state.ranks_bound, "INTERPRET": state.interpret, "enable_fp_fusion": False,
    }  # fmt: skip
