# mypy: disable-error-code="no-untyped-def"
"""Dispatch: a token's row is pushed once to every rank that needs it, and nobody is asked.

Token t of source s lies at cell (s, t) of each receiver's staging, so no counts are exchanged
before rows travel. Beside each row its record: 16 local slots (-1: not here), 16 weights. A flag
stands for a unit of CHUNK consecutive tokens: one for low latency (a row is used as soon as it
comes), several where a fence a token would cost more than it gains.

    rank 1 of 2, S = 2, token 0 with slots (3, 0), token 1 with slots (3, -1)
    to rank 0: row of token 0, records (-1, 0), (-1, -1)
    to rank 1: rows of both, records (1, -1), (1, -1)

Sending and receiving are kernels of their own, between which other work may run, or one kernel
whose first programs send and whose others receive. Senders never wait, so it ends in whatever order
programs run, as long as the senders come first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from crossdock.kernels.rounding import quantise_blocks
from crossdock.kernels.signals import (
    _BAD_SLOT,
    _SLOT_FULL,
    COUNT_MASK,
    COUNT_SHIFT,
    bases_of_ranks,
    fail,
    pointer_at,
    release,
    settle,
    wait,
)

MAX_K = 16
"""Most experts of a token; a record has 2 * MAX_K int32 words."""
_K = tl.constexpr(MAX_K)
SPAN = 16
"""Units that a receiving program waits for together where rows stay in the staging."""
_SPAN = tl.constexpr(SPAN)


@triton.jit
def _open(
    bases, epoch, tokens, counts, num_counts, size, rank, off_counts, R_MAX: tl.constexpr
):  # fmt: skip
    """Zeroes `counts`, then tells all ranks, this one too, how many tokens come."""
    at = 0
    while at < num_counts:
        index = at + tl.arange(0, 256)
        tl.store(counts + index, tl.zeros((256,), tl.int32), mask=index < num_counts)
        at += 256
    words = (bases + off_counts + rank * 8).to(tl.pointer_type(tl.int64))
    release(words, (epoch << COUNT_SHIFT) | tokens, tl.arange(0, R_MAX) < size)


@triton.jit
def _send(
    program, programs, x, slots, weights, bases, epoch, sent,
    tokens, H, top_k, local_slots, size, rank, max_tokens, units,
    off_flags, off_records, off_rows, off_scales, error, mirror,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr, R_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    ranks = tl.arange(0, R_MAX)
    k = tl.arange(0, _K)
    groups, lanes = tl.arange(0, GROUPS), tl.arange(0, 128)
    width = H // 128
    channels = groups[:, None] * 128 + lanes[None, :]
    inside = (groups < width)[:, None]
    wire: tl.constexpr = tl.float8e4nv if FP8 else x.dtype.element_ty
    itemsize: tl.constexpr = wire.primitive_bitwidth // 8
    unit = program
    while unit < tl.cdiv(tokens, CHUNK):
        token = unit * CHUNK
        while token < tl.minimum(tokens, unit * CHUNK + CHUNK):
            row = tl.load(x + token.to(tl.int64) * H + channels, mask=inside, other=0.0)
            given = tl.load(slots + token * top_k + k, mask=k < top_k, other=-1)
            weight = tl.load(weights + token * top_k + k, mask=k < top_k, other=0.0)
            wrong = (given < -1) | (given >= size * local_slots)
            if tl.sum(wrong.to(tl.int32), axis=0) > 0:
                fail(error, mirror, _BAD_SLOT, token)
            slot = tl.where(wrong, -1, given).to(tl.int32)
            target = tl.where(slot >= 0, slot // local_slots, -1)
            if FP8:
                values, scales = quantise_blocks(row.to(tl.float32), INTERPRET)
            else:
                values = row
            cell = (rank * max_tokens + token).to(tl.int64)
            turn = 0
            while turn < size:
                peer = (rank + 1 + turn) % size
                here = target == peer
                base = tl.sum(tl.where(ranks == peer, bases, 0), axis=0)
                record = pointer_at(base, off_records + cell * (_K * 8), tl.int32)
                tl.store(record + k, tl.where(here, slot - peer * local_slots, -1))
                if tl.sum(here.to(tl.int32), axis=0) > 0:
                    bits = tl.where(here, weight, 0.0).to(tl.int32, bitcast=True)
                    tl.store(record + _K + k, bits)
                    out = pointer_at(base, off_rows + cell * H * itemsize, wire)
                    tl.store(out + channels, values, mask=inside)
                    if FP8:
                        scale = pointer_at(base, off_scales, tl.float32)
                        tl.store(scale + cell * width + groups, scales, mask=groups < width)
                    tl.atomic_add(sent + peer, 1, sem="relaxed")
                turn += 1
            token += 1
        flags = (bases + off_flags + (rank * units + unit) * 8).to(tl.pointer_type(tl.int64))
        release(flags, tl.zeros((R_MAX,), tl.int64) + epoch, ranks < size)
        unit += programs


@triton.jit
def _arrived(
    source, unit, rank, epoch, count_words, flag_words, units, error, mirror, limit,
    CHUNK: tl.constexpr, UNITS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Waits for UNITS units of a source from `unit` on, as far as it has them, and for this rank's
    own word, before which its counts are not zero. Returns the tokens of the source."""
    lane = tl.arange(0, 2 * UNITS if UNITS > 1 else 4)
    within = tl.minimum(tl.maximum(lane - 2, 0), UNITS - 1)
    units_here = tl.minimum(unit + within, units - 1)
    flags = tl.where(
        lane < 2,
        count_words + tl.where(lane == 0, source, rank),
        flag_words + source * units + units_here,
    )
    words = wait(
        flags, tl.where(lane == 1, rank, source), epoch, tl.where(lane < 2, COUNT_SHIFT, 0),
        tl.where(lane < 2, -1, units_here * CHUNK), error, mirror, limit, 1, True, INTERPRET,
    )  # fmt: skip
    return (tl.sum(tl.where(lane == 0, words, 0), axis=0) & COUNT_MASK).to(tl.int32)


@triton.jit
def _receive_rows(
    program, programs, count_words, flag_words, records, epoch, slots, weights, tokens, counts,
    top_k, size, rank, max_tokens, units, error, mirror, limit,
    CHUNK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, _K)[None, :]
    work = program
    while work < size * tl.cdiv(units, _SPAN):
        source, unit = work % size, work // size * _SPAN
        count = _arrived(
            source, unit, rank, epoch, count_words, flag_words, units, error, mirror, limit,
            CHUNK, _SPAN, INTERPRET,
        )  # fmt: skip
        if unit == 0:
            tl.store(tokens + source, count)
        token = (unit * CHUNK + tl.arange(0, _SPAN * CHUNK))[:, None]
        cell = source * max_tokens + token
        came = (token < count) & (k < top_k)
        record = records + cell * (2 * _K) + k
        slot = tl.load(record, mask=came, other=-1, volatile=True)
        bits = tl.load(record + _K, mask=came & (slot >= 0), other=0, volatile=True)
        place = cell * top_k + k
        kept = (token < max_tokens) & (k < top_k)
        tl.store(slots + place, slot.to(tl.int64), mask=kept)
        tl.store(weights + place, bits.to(tl.float32, bitcast=True), mask=kept)
        tl.atomic_add(counts + slot, 1, mask=slot >= 0, sem="relaxed")
        work += programs


@triton.jit
def _receive_masked(
    program, programs, count_words, flag_words, records, rows, scales, epoch, places, weights,
    tokens, counts, out, out_scales, H, size, rank, max_tokens, units, capacity,
    error, mirror, limit,
    GROUPS: tl.constexpr, FP8: tl.constexpr, TOP: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, _K)
    groups, lanes = tl.arange(0, GROUPS), tl.arange(0, 128)
    width = H // 128
    channels = groups[:, None] * 128 + lanes[None, :]
    inside = (groups < width)[:, None]
    work = program
    while work < size * max_tokens:
        source, token = work % size, work // size
        count = _arrived(
            source, token, rank, epoch, count_words, flag_words, units, error, mirror, limit, 1,
            1, INTERPRET,
        )  # fmt: skip
        if token == 0:
            tl.store(tokens + source, count)
        if token < count:
            cell = (source * max_tokens + token).to(tl.int64)
            slot = tl.load(records + cell * (2 * _K) + k, volatile=True)
            here = slot >= 0
            if tl.sum(here.to(tl.int32), axis=0) > 0:
                row = tl.load(rows + cell * H + channels, mask=inside)
                bits = tl.load(records + cell * (2 * _K) + _K + k)
                if FP8:
                    scale = tl.load(scales + cell * width + groups, mask=groups < width)
                place = tl.atomic_add(counts + slot, 1, mask=here, sem="relaxed")
                fits = here & (place < capacity)
                if tl.sum((here & (place >= capacity)).to(tl.int32), axis=0) > 0:
                    fail(error, mirror, _SLOT_FULL, source)
                place = tl.where(fits, slot * capacity + place, -1)
                for i in tl.static_range(TOP):
                    target = tl.sum(tl.where(k == i, place, 0), axis=0).to(tl.int64)
                    if target >= 0:
                        tl.store(out + target * H + channels, row, mask=inside)
                        if FP8:
                            to = out_scales + target * width + groups
                            tl.store(to, scale, mask=groups < width)
                tl.store(weights + cell * _K + k, bits.to(tl.float32, bitcast=True))
            else:
                place = slot
            tl.store(places + cell * _K + k, place)
        work += programs


@triton.jit(do_not_specialize=["tokens"])
def dispatch_send(
    x, slots, weights, table, epochs, sent, counts, num_counts,
    tokens, H, top_k, local_slots, size, rank, max_tokens, units,
    off_counts, off_flags, off_records, off_rows, off_scales, error, mirror,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr, R_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """x [T, H], slots int64 and weights fp32 [T, K]. Zeroes `counts` for the receiving kernel and
    adds the rows sent to each rank to `sent` [R]. The first program only announces. A slot that no
    rank has is an error and sent nowhere."""
    program = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    bases = bases_of_ranks(table, tl.arange(0, R_MAX), size)
    if program == 0:
        tl.store(epochs + 1, epoch)
        _open(bases, epoch, tokens, counts, num_counts, size, rank, off_counts, R_MAX)
    else:
        _send(
            program - 1, tl.num_programs(0) - 1, x, slots, weights, bases, epoch, sent,
            tokens, H, top_k, local_slots, size, rank, max_tokens, units,
            off_flags, off_records, off_rows, off_scales, error, mirror,
            CHUNK, GROUPS, FP8, R_MAX, INTERPRET,
        )  # fmt: skip


@triton.jit
def dispatch_rows(
    count_words, flag_words, records, epochs, slots, weights, tokens, counts,
    top_k, size, rank, max_tokens, units, error, mirror, limit,
    CHUNK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Waits for all rows, which stay in the staging, N = R * max_tokens. Writes slots int64 [N, K]
    (-1 also where no row came), weights fp32 [N, K], the tokens of each source and adds the rows
    of each slot to `counts`."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + 1)
    if program == 0:
        tl.store(epochs, epoch)
    _receive_rows(
        program, tl.num_programs(0), count_words, flag_words, records, epoch, slots, weights,
        tokens, counts, top_k, size, rank, max_tokens, units, error, mirror, limit,
        CHUNK, INTERPRET,
    )  # fmt: skip


@triton.jit
def dispatch_masked(
    count_words, flag_words, records, rows, scales, epochs, places, weights, tokens, counts,
    out, out_scales, H, size, rank, max_tokens, units, capacity, error, mirror, limit,
    GROUPS: tl.constexpr, FP8: tl.constexpr, TOP: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Waits for each row (CHUNK 1) and copies it to the next free place of each of its slots: out
    [S, C, H], counts [S]; places int32 and weights fp32 [N, 16] say where copies lie (slot * C +
    place, or -1), for combine. The order within a slot is that of arrival. Where C = R * max_tokens
    places do not do, since a token names a slot twice, that is an error and nothing is written."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + 1)
    if program == 0:
        tl.store(epochs, epoch)
    _receive_masked(
        program, tl.num_programs(0), count_words, flag_words, records, rows, scales, epoch, places,
        weights, tokens, counts, out, out_scales, H, size, rank, max_tokens, units, capacity,
        error, mirror, limit, GROUPS, FP8, TOP, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def dispatch_fused(
    x, slots, weights, table, epochs, sent, counts, num_counts,
    tokens, H, top_k, local_slots, size, rank, max_tokens, units,
    off_counts, off_flags, off_records, off_rows, off_scales, senders,
    count_words, flag_words, records, rows, scales, out_slots, out_weights, tokens_R,
    out, out_scales, capacity, error, mirror, limit,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr,
    TOP: tl.constexpr, R_MAX: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`dispatch_send` and `dispatch_rows` (or, MASKED, `dispatch_masked`; out_slots are then the
    places) in one launch: one program announces, `senders` send, the others receive."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs) + 1
    bases = bases_of_ranks(table, tl.arange(0, R_MAX), size)
    if program > senders:
        settle(epochs, epoch, programs)  # first, beside the way of the rows
        receiver, receivers = program - senders - 1, programs - senders - 1
        if MASKED:
            _receive_masked(
                receiver, receivers, count_words, flag_words, records, rows, scales, epoch,
                out_slots, out_weights, tokens_R, counts, out, out_scales, H, size, rank,
                max_tokens, units, capacity, error, mirror, limit, GROUPS, FP8, TOP, INTERPRET,
            )  # fmt: skip
        else:
            _receive_rows(
                receiver, receivers, count_words, flag_words, records, epoch, out_slots,
                out_weights, tokens_R, counts, top_k, size, rank, max_tokens, units,
                error, mirror, limit, CHUNK, INTERPRET,
            )  # fmt: skip
    else:
        if program == 0:
            _open(bases, epoch, tokens, counts, num_counts, size, rank, off_counts, R_MAX)
        else:
            _send(
                program - 1, senders, x, slots, weights, bases, epoch, sent,
                tokens, H, top_k, local_slots, size, rank, max_tokens, units,
                off_flags, off_records, off_rows, off_scales, error, mirror,
                CHUNK, GROUPS, FP8, R_MAX, INTERPRET,
            )  # fmt: skip
        settle(epochs, epoch, programs)


def staging_torch(
    slots_RTK: list[Tensor], weights_RTK: list[Tensor], rank: int, local_slots: int, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Twin: `(slots_NK, weights_NK)` as `dispatch_rows` writes them at `rank`."""
    top_k = slots_RTK[0].shape[1]
    shape = (len(slots_RTK), max_tokens, top_k)
    slots, weights = torch.full(shape, -1, dtype=torch.int64), torch.zeros(shape)
    for source, (slots_TK, weights_TK) in enumerate(zip(slots_RTK, weights_RTK, strict=True)):
        local = slots_TK - rank * local_slots
        here = (local >= 0) & (local < local_slots) & (slots_TK >= 0)
        slots[source, : len(local)] = local.masked_fill(~here, -1)
        weights[source, : len(local)] = weights_TK.masked_fill(~here, 0.0)
    return slots.flatten(0, 1), weights.flatten(0, 1)
