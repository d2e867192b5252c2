# mypy: disable-error-code="no-untyped-def"
"""Combine: rows go home to cells that their token owns there, and home sums them in fixed order.

From a rank that reduces its own experts' rows (weighted, fp32): one row per (token, rank), in cell
(rank, token); home sums in rank order. Per expert: one row per (token, k), unweighted, in cell
(token, k); home weighs and sums in the order of k.

Programs stand in lanes of R: the first R - 1 of a lane send the lane's units (a unit: CHUNK
consecutive tokens of a home, one flag) home to one rank each, the last serves this rank. Sending
and summing are kernels of their own, or one in which the last of a lane sums what the peers'
programs of the same lane send; its own rank's part it then takes from where it lies. Only the last
waits, and for earlier ones, so the kernel ends even if programs run one after another; all ranks
must launch as many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from crossdock.kernels.rounding import cast_rows
from crossdock.kernels.signals import (
    announce,
    bases_of_ranks,
    pointer_at,
    release,
    settle,
    wait,
)

_K = tl.constexpr(16)

REDUCED, INDEXED, PER_EXPERT, PER_EXPERT_INDEXED = range(4)
"""What y holds: rows [N, H] already reduced; rows found by index, to be weighed and summed;
[N, K, H] unweighted; rows found by index, to travel as they are."""
_REDUCED, _INDEXED = tl.constexpr(REDUCED), tl.constexpr(INDEXED)
_PER_EXPERT, _PER_EXPERT_INDEXED = tl.constexpr(PER_EXPERT), tl.constexpr(PER_EXPERT_INDEXED)


@triton.jit
def _weighed(y, slot, weight, H, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """fp32 sum of the rows of y that `slot` names (-1: none), in the order of k."""
    h = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    here = (slot >= 0).to(tl.int32)
    rows = tl.sum(here, axis=0)
    order = tl.where(slot >= 0, tl.cumsum(here, axis=0), 0)
    done = 0
    while done < rows:  # several at a time: their loads wait together
        for i in tl.static_range(1, UNROLL + 1):
            this = order == done + i
            at = tl.sum(tl.where(this, slot, 0), axis=0).to(tl.int64)
            w = tl.sum(tl.where(this, weight, 0.0), axis=0)
            part = tl.load(y + at * H + h, mask=(h < H) & (done + i <= rows), other=0.0)
            total += part.to(tl.float32) * w
        done += UNROLL
    return total


@triton.jit
def _announce(bases, epoch, size, rank, off_counts, R_MAX: tl.constexpr):
    words = (bases + off_counts + rank * 8).to(tl.pointer_type(tl.int64))
    announce(words, tl.zeros((R_MAX,), tl.int64) + epoch, tl.arange(0, R_MAX) < size)


@triton.jit
def _send_home(
    lane, lanes, home, y, slots, weights, tokens, bases, epoch, sent, H, top_k, stride, rank,
    max_tokens, units, off_flags, off_home,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
    R_MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, _K)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype: tl.constexpr = y.dtype.element_ty
    itemsize: tl.constexpr = dtype.primitive_bitwidth // 8
    count = tl.load(tokens + home)
    base = tl.sum(tl.where(tl.arange(0, R_MAX) == home, bases, 0), axis=0)
    unit = lane
    while unit * CHUNK < count:
        token = unit * CHUNK
        # What is at hand about the next token is loaded before it is known whether there is one.
        row = (home * max_tokens + token).to(tl.int64)
        slot = tl.load(slots + row * stride + k, mask=k < top_k, other=-1)
        weight = tl.load(weights + row * stride + k, mask=k < top_k, other=0.0)
        while token < tl.minimum(count, unit * CHUNK + CHUNK):
            rows = tl.sum((slot >= 0).to(tl.int32), axis=0)
            if MODE < _PER_EXPERT:
                # Reduced rows of this rank's own tokens are taken from y where they are summed.
                if (rows > 0) & ((MODE == _INDEXED) | (home != rank)):
                    if MODE == _INDEXED:
                        total = _weighed(y, slot, weight, H, BLOCK, UNROLL)
                        value = cast_rows(total, dtype, INTERPRET)
                    else:
                        value = tl.load(y + row * H + h, mask=inside, other=0.0)
                    cell = (rank * max_tokens + token).to(tl.int64)
                    out = pointer_at(base, off_home + cell * H * itemsize, dtype)
                    tl.store(out + h, value, mask=inside)
                tl.atomic_add(sent + home, (rows > 0).to(tl.int64), sem="relaxed")
            else:
                i = 0
                while i < top_k:
                    if tl.sum(tl.where(k == i, slot, 0), axis=0) >= 0:
                        at = row * top_k + i
                        if MODE == _PER_EXPERT_INDEXED:
                            at = tl.sum(tl.where(k == i, slot, 0), axis=0).to(tl.int64)
                        value = tl.load(y + at * H + h, mask=inside, other=0.0)
                        cell = (token * top_k + i).to(tl.int64)
                        out = pointer_at(base, off_home + cell * H * itemsize, dtype)
                        tl.store(out + h, value, mask=inside)
                    i += 1
                tl.atomic_add(sent + home, rows.to(tl.int64), sem="relaxed")
            token += 1
            row += 1
            there = (k < top_k) & (token < max_tokens)
            slot = tl.load(slots + row * stride + k, mask=there, other=-1)
            weight = tl.load(weights + row * stride + k, mask=there, other=0.0)
        flag = pointer_at(base, off_flags, tl.int64) + (rank * units + unit)
        release(flag, epoch, unit >= 0)
        unit += lanes


@triton.jit
def _sum_home(
    lane, lanes, home, y, slots, weights, places, place_weights, count_words, flag_words, epoch,
    sent, out, tokens, H, top_k, stride, local_slots, size, rank, max_tokens, units,
    error, mirror, limit,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr,
    UNROLL: tl.constexpr, R_MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """slots, weights [T, K] as the tokens were routed. OWN: this rank's part is not in `home` but
    in y (`places` and their weights [N, ..] as for the sending half)."""
    peers = tl.minimum(tl.arange(0, R_MAX), size - 1)
    awaited = True
    if OWN:  # its own flags nobody raises
        peers = tl.where(peers == rank, (rank + 1) % size, peers)
        awaited = size > 1
    k = tl.arange(0, _K)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype: tl.constexpr = out.dtype.element_ty
    near = rank if OWN else -1
    NEAR: tl.constexpr = MODE == _REDUCED or (MODE == _INDEXED and OWN)
    if (lane == 0) & awaited:
        # Without tokens nothing else tells that the peers have read what they were sent.
        wait(count_words + peers, peers, epoch, 0, 0, error, mirror, limit, 2, False, INTERPRET)
    unit = lane
    while unit < tl.cdiv(tokens, CHUNK):
        first = unit * CHUNK
        token = first
        while token < tl.minimum(tokens, first + CHUNK):
            slot = tl.load(slots + token * top_k + k, mask=k < top_k, other=-1).to(tl.int32)
            target = tl.where(slot >= 0, slot // local_slots, -1)
            row = (rank * max_tokens + token).to(tl.int64)
            total = tl.zeros((BLOCK,), tl.float32)
            own = tl.sum((target == rank).to(tl.int32), axis=0)
            if OWN:
                passed = own if MODE >= _PER_EXPERT else (own > 0)
                tl.atomic_add(sent + rank, passed.to(tl.int64), sem="relaxed")
            if NEAR:  # before the wait, beside the way of the others
                if MODE == _INDEXED:
                    here = tl.load(places + row * stride + k, mask=k < top_k, other=-1)
                    w = tl.load(place_weights + row * stride + k, mask=k < top_k, other=0.0)
                    mine = cast_rows(_weighed(y, here, w, H, BLOCK, UNROLL), dtype, INTERPRET)
                else:
                    mine = tl.load(y + row * H + h, mask=inside & (own > 0), other=0.0)
            if (token == first) & awaited:
                flags = flag_words + peers * units + unit
                wait(flags, peers, epoch, 0, 0, error, mirror, limit, 2, False, INTERPRET)
            if MODE < _PER_EXPERT:
                source = 0
                while source < size:
                    if tl.sum((target == source).to(tl.int32), axis=0) > 0:
                        cell = (source * max_tokens + token).to(tl.int64)
                        if NEAR:
                            far = inside & (source != rank)
                            part = tl.load(home + cell * H + h, mask=far, other=0.0)
                            total += tl.where(source == rank, mine, part).to(tl.float32)
                        else:
                            part = tl.load(home + cell * H + h, mask=inside, other=0.0)
                            total += part.to(tl.float32)
                    source += 1
            else:
                weight = tl.load(weights + token * top_k + k, mask=k < top_k, other=0.0)
                i = 0
                while i < top_k:
                    source = tl.sum(tl.where(k == i, target, 0), axis=0)
                    if source >= 0:
                        cell = (token * top_k + i).to(tl.int64)
                        part = tl.load(
                            home + cell * H + h, mask=inside & (source != near), other=0.0
                        )
                        if OWN:
                            at = row * top_k + i
                            if MODE == _PER_EXPERT_INDEXED:
                                there = places + row * stride + i
                                at = tl.load(there, mask=source == rank, other=0).to(tl.int64)
                            mine = tl.load(
                                y + at * H + h, mask=inside & (source == rank), other=0.0
                            )
                            part = tl.where(source == rank, mine, part)
                        w = tl.sum(tl.where(k == i, weight, 0.0), axis=0)
                        total = total + part.to(tl.float32) * w
                    i += 1
            value = cast_rows(total, dtype, INTERPRET)
            tl.store(out + token.to(tl.int64) * H + h, value, mask=inside)
            token += 1
        unit += lanes


@triton.jit
def combine_send(
    y, slots, weights, tokens, table, epochs, sent, H, top_k, stride, size, rank,
    max_tokens, units, off_counts, off_flags, off_home,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
    R_MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """slots: [N, K] in rows of `stride`, -1 where nothing is here; in the indexed modes rows of y,
    weights likewise. `tokens` [R]: how many each source sent. Adds the rows sent to each rank to
    `sent` [R]. Programs: a multiple of R."""
    program = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    bases = bases_of_ranks(table, tl.arange(0, R_MAX), size)
    if program == 0:
        tl.store(epochs + 1, epoch)
        _announce(bases, epoch, size, rank, off_counts, R_MAX)
    _send_home(
        program // size, tl.num_programs(0) // size, (rank + 1 + program) % size, y, slots, weights,
        tokens, bases, epoch, sent, H, top_k, stride, rank, max_tokens, units, off_flags, off_home,
        CHUNK, BLOCK, MODE, UNROLL, R_MAX, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def combine_home(
    home, y, slots, weights, count_words, flag_words, epochs, sent, out, tokens, H, top_k,
    local_slots, size, rank, max_tokens, units, error, mirror, limit,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, R_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the sums, as home's dtype; zero where a token has no slot. y: in mode REDUCED
    what this rank sent. slots: those of this rank's tokens, physical, [T, K]."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + 1)
    if program == 0:
        tl.store(epochs, epoch)
    _sum_home(
        program, tl.num_programs(0), home, y, slots, weights, slots, weights, count_words,
        flag_words, epoch, sent, out, tokens, H, top_k, top_k, local_slots, size, rank, max_tokens,
        units, error, mirror, limit, CHUNK, BLOCK, MODE, False, 1, R_MAX, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def combine_fused(
    y, places, place_weights, tokens_R, table, epochs, sent, home, slots, weights, count_words,
    flag_words, out, tokens, H, top_k, stride, local_slots, size, rank, max_tokens, units,
    off_counts, off_flags, off_home, error, mirror, limit,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
    R_MAX: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`combine_send` (places, place_weights, tokens_R) and `combine_home` (slots, weights, tokens)
    in one launch."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs) + 1
    bases = bases_of_ranks(table, tl.arange(0, R_MAX), size)
    lane, turn = program // size, program % size
    if program == 0:
        _announce(bases, epoch, size, rank, off_counts, R_MAX)
    if turn == size - 1:
        settle(epochs, epoch, programs)  # first, beside the way of the rows
        _sum_home(
            lane, programs // size, home, y, slots, weights, places, place_weights, count_words,
            flag_words, epoch, sent, out, tokens, H, top_k, stride, local_slots, size, rank,
            max_tokens, units, error, mirror, limit, CHUNK, BLOCK, MODE, True, UNROLL, R_MAX,
            INTERPRET,
        )  # fmt: skip
    else:
        _send_home(
            lane, programs // size, (rank + 1 + turn) % size, y, places, place_weights, tokens_R,
            bases, epoch, sent, H, top_k, stride, rank, max_tokens, units, off_flags, off_home,
            CHUNK, BLOCK, MODE, UNROLL, R_MAX, INTERPRET,
        )  # fmt: skip
        settle(epochs, epoch, programs)


def reduce_rows_torch(y_PH: Tensor, places_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Twin of the sending half: fp32 weighted sums `[N, H]` of the rows at `places` (-1: none)."""
    rows = y_PH.float()[places_NK.clamp(min=0)] * weights_NK.unsqueeze(-1)
    rows = rows.masked_fill((places_NK < 0).unsqueeze(-1), 0.0)
    total = torch.zeros_like(rows[:, 0])
    for k in range(rows.shape[1]):
        total = total + rows[:, k]
    return total.to(y_PH.dtype)
