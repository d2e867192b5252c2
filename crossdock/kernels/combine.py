# mypy: disable-error-code="no-untyped-def"
"""Combine: rows go home to cells that their token owns there, and home sums them in fixed order.

From a rank that reduces its own experts' rows (weighted, fp32): one row per (token, rank), in cell
(rank, token); home sums in rank order. Per expert: one row per (token, k), unweighted, in cell
(token, k); home weighs and sums in the order of k.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.rounding import cast_rows
from crossdock.kernels.signals import (
    announce,
    bases_of_ranks,
    pointer_at,
    release,
    wait,
)

_K = tl.constexpr(16)

REDUCED, INDEXED, PER_EXPERT, PER_EXPERT_INDEXED = range(4)
"""What y holds: rows [N, H] already reduced; rows found by index, to be weighed and summed;
[N, K, H] unweighted; rows found by index, to travel as they are."""
_REDUCED, _INDEXED = tl.constexpr(REDUCED), tl.constexpr(INDEXED)
_PER_EXPERT, _PER_EXPERT_INDEXED = tl.constexpr(PER_EXPERT), tl.constexpr(PER_EXPERT_INDEXED)


@triton.jit
def combine_send(
    y, slots, weights, tokens, table, epochs, sent, H, top_k, stride, size, rank,
    max_tokens, units, off_counts, off_flags, off_home,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
    R_MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """slots: [N, K] in rows of `stride`, -1 where nothing is here; in the indexed modes rows of y,
    weights likewise. `tokens` [R]: how many each source sent. Adds the rows sent to each rank to
    `sent` [R]."""
    program = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    ranks = tl.arange(0, R_MAX)
    bases = bases_of_ranks(table, ranks, size)
    k = tl.arange(0, _K)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype: tl.constexpr = y.dtype.element_ty
    itemsize: tl.constexpr = dtype.primitive_bitwidth // 8
    if program == 0:
        tl.store(epochs + 1, epoch)
        words = (bases + off_counts + rank * 8).to(tl.pointer_type(tl.int64))
        announce(words, tl.zeros((R_MAX,), tl.int64) + epoch, ranks < size)
    work = program
    while work < size * units:
        home, unit = (rank + 1 + work) % size, work // size
        count = tl.load(tokens + home)
        base = tl.sum(tl.where(ranks == home, bases, 0), axis=0)
        token = unit * CHUNK
        # What is at hand about the next token is loaded before it is known whether there is one.
        row = (home * max_tokens + token).to(tl.int64)
        slot = tl.load(slots + row * stride + k, mask=k < top_k, other=-1)
        weight = tl.load(weights + row * stride + k, mask=k < top_k, other=0.0)
        while token < tl.minimum(count, unit * CHUNK + CHUNK):
            rows = tl.sum((slot >= 0).to(tl.int32), axis=0)
            if MODE < _PER_EXPERT:
                if rows > 0:
                    if MODE == _INDEXED:
                        total = tl.zeros((BLOCK,), tl.float32)
                        order = tl.where(slot >= 0, tl.cumsum((slot >= 0).to(tl.int32), axis=0), 0)
                        done = 0
                        while done < rows:  # several at a time: their loads wait together
                            for i in tl.static_range(1, UNROLL + 1):
                                this = order == done + i
                                at = tl.sum(tl.where(this, slot, 0), axis=0).to(tl.int64)
                                w = tl.sum(tl.where(this, weight, 0.0), axis=0)
                                there = inside & (done + i <= rows)
                                part = tl.load(y + at * H + h, mask=there, other=0.0)
                                total += part.to(tl.float32) * w
                            done += UNROLL
                        value = cast_rows(total, dtype, INTERPRET)
                    else:
                        value = tl.load(y + row * H + h, mask=inside, other=0.0)
                    cell = (rank * max_tokens + token).to(tl.int64)
                    out = pointer_at(base, off_home + cell * H * itemsize, dtype)
                    # Reduced rows of this rank's own tokens are taken from y where they are summed.
                    if MODE == _INDEXED or home != rank:
                        tl.store(out + h, value, mask=inside)
                    tl.atomic_add(sent + home, 1, sem="relaxed")
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
                tl.atomic_add(sent + home, rows, sem="relaxed")
            token += 1
            row += 1
            there = (k < top_k) & (token < max_tokens)
            slot = tl.load(slots + row * stride + k, mask=there, other=-1)
            weight = tl.load(weights + row * stride + k, mask=there, other=0.0)
        if unit * CHUNK < count:
            flag = pointer_at(base, off_flags, tl.int64) + (rank * units + unit)
            release(flag, epoch, unit >= 0)
        work += tl.num_programs(0)


@triton.jit(do_not_specialize=["tokens"])
def combine_home(
    home, y, slots, weights, count_words, flag_words, epochs, out, tokens, H, top_k, local_slots,
    size, rank, max_tokens, units, error, mirror, limit,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, R_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the sums, as home's dtype; zero where a token has no slot. y: in mode REDUCED
    what this rank sent. slots: those of this rank's tokens, physical, [T, K]."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + 1)
    peers = tl.minimum(tl.arange(0, R_MAX), size - 1)
    k = tl.arange(0, _K)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype: tl.constexpr = out.dtype.element_ty
    if program == 0:
        tl.store(epochs, epoch)
        # Without tokens nothing else tells that the peers have read what they were sent.
        wait(count_words + peers, peers, epoch, error, mirror, limit, 2, INTERPRET, 0)
    unit = program
    while unit < tl.cdiv(tokens, CHUNK):
        wait(
            flag_words + peers * units + unit, peers, epoch, error, mirror, limit, 2, INTERPRET, 0
        )  # fmt: skip
        token = unit * CHUNK
        while token < tl.minimum(tokens, unit * CHUNK + CHUNK):
            slot = tl.load(slots + token * top_k + k, mask=k < top_k, other=-1).to(tl.int32)
            total = tl.zeros((BLOCK,), tl.float32)
            if MODE < _PER_EXPERT:
                target = tl.where(slot >= 0, slot // local_slots, -1)
                source = 0
                while source < size:
                    if tl.sum((target == source).to(tl.int32), axis=0) > 0:
                        cell = (source * max_tokens + token).to(tl.int64)
                        if MODE == _REDUCED and source == rank:
                            part = tl.load(y + cell * H + h, mask=inside, other=0.0)
                        else:
                            part = tl.load(home + cell * H + h, mask=inside, other=0.0)
                        total += part.to(tl.float32)
                    source += 1
            else:
                weight = tl.load(weights + token * top_k + k, mask=k < top_k, other=0.0)
                i = 0
                while i < top_k:
                    if tl.sum(tl.where(k == i, slot, 0), axis=0) >= 0:
                        cell = (token * top_k + i).to(tl.int64)
                        part = tl.load(home + cell * H + h, mask=inside, other=0.0).to(tl.float32)
                        w = tl.sum(tl.where(k == i, weight, 0.0), axis=0)
                        total = total + part * w
                    i += 1
            value = cast_rows(total, dtype, INTERPRET)
            tl.store(out + token.to(tl.int64) * H + h, value, mask=inside)
            token += 1
        unit += tl.num_programs(0)


def reduce_rows_torch(y_PH: Tensor, places_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Twin of the sending half: fp32 weighted sums `[N, H]` of the rows at `places` (-1: none)."""
    rows = y_PH.float()[places_NK.clamp(min=0)] * weights_NK.unsqueeze(-1)
    rows = rows.masked_fill((places_NK < 0).unsqueeze(-1), 0.0)
    total = torch.zeros_like(rows[:, 0])
    for k in range(rows.shape[1]):
        total = total + rows[:, k]
    return total.to(y_PH.dtype)
