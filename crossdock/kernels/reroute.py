# mypy: disable-error-code="no-untyped-def"
"""Which copy of its expert serves each token, from the counts of this very step, on the device.

Of layers whose experts have copies on several ranks. `count` says how many tokens of this rank
chose each expert; after all ranks have exchanged that, `fill_quotas` says how many of an expert's
tokens each of its ranks serves, so that ranks are loaded evenly; `reroute` how many of them come
from this rank (its own copy first), and which. The algorithms and their sources are those of
`balance.reroute`, whole numbers throughout, so both give the same.

    tokens_RE (6 1) (2 5), expert 0 on both ranks, expert 1 on rank 1
    quotas: expert 0 (7 1), expert 1 (0 6); rank 0 keeps 6, rank 1 sends 1 of its 2 there

Quotas are filled expert by expert, each knowing what those before it filled. But experts without a
rank in common know nothing of each other: they are filled together, in *waves*, to the same end.
At EP64 with two more slots a rank, 64 experts have copies and there are 8 waves or so.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.host_copy import copy_from_host

SWEEPS = 2
"""As in `balance.reroute`."""
WAVE = 16
"""Most experts of a wave."""
_BLOCK = 128
"""Entries of ids that a program looks at, each beside each."""
_PREFIX_ROWS, _PREFIX_WIDTH = 64, 32
_FILL_TILE = 2048


@dataclass(frozen=True, eq=False)
class Copies:
    """Of one layer, at fixed addresses. slot_ER: int32, an expert's first slot on each rank, -1 for
    none. waves_EL: int32, a wave a row, its experts and -1 for none. num_waves: int32 [1]."""

    slot_ER: Tensor
    waves_EL: Tensor
    num_waves: Tensor

    @classmethod
    def empty(cls, experts: int, ranks: int, device: torch.device) -> "Copies":
        slot_ER, waves_EL, num_waves = (
            torch.empty(shape, dtype=torch.int32, device=device)
            for shape in ((experts, ranks), (experts, WAVE), (1,))
        )
        return cls(slot_ER, waves_EL, num_waves)

    def load(self, slot_ER: np.ndarray) -> None:
        """Between steps."""
        waves_EL, num_waves = waves_of(slot_ER >= 0)
        copy_from_host(self.slot_ER, slot_ER)
        copy_from_host(self.waves_EL, waves_EL)
        self.num_waves.fill_(num_waves)


@dataclass(frozen=True, eq=False)
class Counted:
    """tokens_E: int32, entries that name each expert. Of the entries in blocks: places, int32, how
    many before in its block name the same; before_BE, int32, how many in the blocks before."""

    tokens_E: Tensor
    places: Tensor
    before_BE: Tensor


def waves_of(host_ER: np.ndarray) -> tuple[np.ndarray, int]:
    """`(waves_EL, num_waves)` of the experts on several ranks: each in a wave behind all those that
    come before it and share a rank with it."""
    experts, ranks = host_ER.shape
    waves: list[list[int]] = []
    first_R = np.zeros(ranks, np.int64)  # that is behind all waves of a rank's experts so far
    for expert in np.flatnonzero(host_ER.sum(axis=1) > 1).tolist():
        at = int(first_R[host_ER[expert]].max())
        while at < len(waves) and len(waves[at]) == WAVE:
            at += 1
        if at == len(waves):
            waves.append([])
        waves[at].append(expert)
        first_R[host_ER[expert]] = at + 1
    waves_EL = np.full((experts, WAVE), -1, np.int32)
    for at, wave in enumerate(waves):
        waves_EL[at, : len(wave)] = wave
    return waves_EL, len(waves)


@triton.jit
def _count_kernel(ids, places, counts_BE, entries, experts, E_MAX: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    entry = block * BLOCK + i
    e = tl.load(ids + entry, mask=entry < entries, other=-1).to(tl.int32)
    row = counts_BE + block * experts
    column = tl.arange(0, E_MAX)
    tl.store(row + column, tl.zeros((E_MAX,), tl.int32), mask=column < experts)
    # One sum for both: those before, and above 16 bits those behind.
    side = tl.where(i[None, :] < i[:, None], 1, tl.where(i[None, :] > i[:, None], 1 << 16, 0))
    beside = tl.sum(tl.where(e[:, None] == e[None, :], side, 0), axis=1)
    place = beside & 0xFFFF
    tl.store(places + entry, place, mask=entry < entries)
    tl.debug_barrier()  # the zeroes are there
    tl.store(row + e, place + 1, mask=(e >= 0) & (beside >> 16 == 0))


@triton.jit
def _prefix_kernel(counts_BE, tokens_E, blocks, experts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Turns counts of blocks into those of the blocks before, for some experts."""
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    at = 0
    while at < blocks:
        b = at + tl.arange(0, ROWS)
        cells = counts_BE + b[:, None] * experts + e[None, :]
        mask = (b < blocks)[:, None] & (e < experts)[None, :]
        counts = tl.load(cells, mask=mask, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(cells, before, mask=mask)
        total += tl.sum(counts, axis=0)
        at += ROWS
    tl.store(tokens_E + e, total, mask=e < experts)


@triton.jit
def _equal_parts_kernel(tokens_RE, slot_ER, quota_ER, ranks, experts, R_MAX: tl.constexpr):
    e = tl.program_id(0)
    r = tl.arange(0, R_MAX)
    inside = r < ranks
    tokens = tl.load(tokens_RE + r * experts + e, mask=inside, other=0).to(tl.int32)
    total = tl.sum(tokens, axis=0)
    host = (tl.load(slot_ER + e * ranks + r, mask=inside, other=-1) >= 0).to(tl.int32)
    count = tl.sum(host, axis=0)
    each = total // count
    extra = tl.cumsum(host, axis=0) <= total - each * count
    tl.store(quota_ER + e * ranks + r, host * (each + extra.to(tl.int32)), mask=inside)


@triton.jit
def _wave_rows(quota_ER, slot_ER, e, ranks, R_MAX: tl.constexpr):
    """(quotas, slots) [L, R] of the experts of a wave."""
    r = tl.arange(0, R_MAX)
    cells = e[:, None] * ranks + r[None, :]
    mask = (e >= 0)[:, None] & (r < ranks)[None, :]
    quota = tl.load(quota_ER + cells, mask=mask, other=0)
    return quota, tl.load(slot_ER + cells, mask=mask, other=-1)


@triton.jit
def _level(tokens, load, below):
    """(total, count, level, still): `tokens` on top of the ranks `below`, and those not above."""
    count = tl.sum(below.to(tl.int32), axis=1)
    total = tokens + tl.sum(tl.where(below, load[None, :], 0), axis=1)
    level = total // tl.maximum(count, 1)
    return total, count, level, below & (load[None, :] <= level[:, None])


@triton.jit
def _fill_kernel(
    slot_ER, waves_EL, num_waves, quota_ER, ranks, experts, SWEEPS: tl.constexpr,
    R_MAX: tl.constexpr, WAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, since a wave must know what the ones before it have filled."""
    r = tl.arange(0, R_MAX)
    lane = tl.arange(0, WAVE)
    load = tl.zeros((R_MAX,), tl.int32)
    at = 0
    while at < experts:
        e = at + tl.arange(0, BLOCK)
        mask = (e < experts)[:, None] & (r < ranks)[None, :]
        part = tl.load(quota_ER + e[:, None] * ranks + r[None, :], mask=mask, other=0)
        load += tl.sum(part, axis=0)
        at += BLOCK
    num = tl.load(num_waves)
    for _ in tl.static_range(SWEEPS):
        e = tl.load(waves_EL + lane)
        after = tl.load(waves_EL + WAVE + lane, mask=lane * 0 + num > 1, other=-1)
        old, slot = _wave_rows(quota_ER, slot_ER, e, ranks, R_MAX)
        for i in range(0, num):
            # Under way while this wave is filled, which writes none of it.
            ahead = tl.load(waves_EL + (i + 2) * WAVE + lane, mask=lane * 0 + i + 2 < num, other=-1)
            next_old, next_slot = _wave_rows(quota_ER, slot_ER, after, ranks, R_MAX)
            tokens = tl.sum(old, axis=1)
            load -= tl.sum(old, axis=0)
            # Raised to one level; ranks above it serve none, and the others are looked at again.
            below = slot >= 0
            total, count, level, still = _level(tokens, load, below)
            while tl.sum(count - tl.sum(still.to(tl.int32), axis=1), axis=0) > 0:
                below = still
                total, count, level, still = _level(tokens, load, below)
            extra = tl.cumsum(below.to(tl.int32), axis=1) <= (total - level * count)[:, None]
            new = tl.where(below, level[:, None] - load[None, :] + extra.to(tl.int32), 0)
            cells = e[:, None] * ranks + r[None, :]
            tl.store(quota_ER + cells, new, mask=(e >= 0)[:, None] & (r < ranks)[None, :])
            load += tl.sum(new, axis=0)
            e, after, old, slot = after, ahead, next_old, next_slot
        tl.debug_barrier()  # the next sweep reads what this one wrote


@triton.jit
def _shares_kernel(tokens_RE, quota_ER, end_ER, rank, ranks, experts, R_MAX: tl.constexpr):
    """Of an expert's tokens of this rank, in order, those below `end` go to the ranks so far."""
    e = tl.program_id(0)
    r = tl.arange(0, R_MAX)
    inside = r < ranks
    tokens = tl.load(tokens_RE + r * experts + e, mask=inside, other=0).to(tl.int64)
    quota = tl.load(quota_ER + e * ranks + r, mask=inside, other=0).to(tl.int64)
    own = tl.minimum(tokens, quota)
    free = quota - own
    left = tl.sum(tl.where(r == rank, tokens - own, 0), axis=0)
    whole = tl.maximum(tl.sum(free, axis=0), 1)
    part = free * left // whole
    rest = free * left - part * whole
    larger = rest[None, :] > rest[:, None]
    first = (rest[None, :] == rest[:, None]) & (r[None, :] < r[:, None])
    place = tl.sum((larger | first).to(tl.int32), axis=1)
    part += (place < left - tl.sum(part, axis=0)).to(tl.int64)
    end = tl.cumsum(part + tl.where(r == rank, own, 0), axis=0).to(tl.int32)
    tl.store(end_ER + e * ranks + r, end, mask=inside)


@triton.jit
def _assign_kernel(
    ids, places, before_BE, end_ER, slot_ER, slots, entries, ranks, experts, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BITS: of the number of ranks."""
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + entry, mask=entry < entries, other=-1).to(tl.int32)
    live = e >= 0
    index = tl.load(places + entry, mask=live, other=0)
    index += tl.load(before_BE + block * experts + e, mask=live, other=0)
    passed = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(BITS):
        probe = passed + (1 << (BITS - 1 - bit))
        end = tl.load(end_ER + e * ranks + probe - 1, mask=live & (probe <= ranks), other=1 << 30)
        passed = tl.where(end <= index, probe, passed)
    slot = tl.load(slot_ER + e * ranks + passed, mask=live & (passed < ranks), other=-1)
    tl.store(slots + entry, slot.to(tl.int64), mask=entry < entries)


def count(ids_TK: Tensor, experts: int) -> Counted:
    """Of this rank's tokens; -1 counts for nothing. ids_TK: int64, contiguous."""
    entries, device = ids_TK.numel(), ids_TK.device
    blocks = triton.cdiv(entries, _BLOCK)
    tokens_E = torch.empty(experts, dtype=torch.int32, device=device)
    places = torch.empty(entries, dtype=torch.int32, device=device)
    counts_BE = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    if entries:
        _count_kernel[(blocks,)](
            ids_TK, places, counts_BE, entries, experts, E_MAX=triton.next_power_of_2(experts),
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    _prefix_kernel[(triton.cdiv(experts, _PREFIX_WIDTH),)](
        counts_BE, tokens_E, blocks, experts, ROWS=_PREFIX_ROWS, WIDTH=_PREFIX_WIDTH, num_warps=4
    )
    return Counted(tokens_E, places, counts_BE)


def fill_quotas(tokens_RE: Tensor, copies: Copies, sweeps: int = SWEEPS) -> Tensor:
    """`quota_ER`, int32: tokens of each expert that each rank serves. tokens_RE: integers,
    contiguous, what the tokens of each rank chose."""
    (R, E), device = tokens_RE.shape, tokens_RE.device
    quota_ER = torch.empty(E, R, dtype=torch.int32, device=device)
    R_MAX = _bound(R)
    _equal_parts_kernel[(E,)](tokens_RE, copies.slot_ER, quota_ER, R, E, R_MAX=R_MAX, num_warps=1)
    _fill_kernel[(1,)](
        copies.slot_ER, copies.waves_EL, copies.num_waves, quota_ER, R, E, SWEEPS=sweeps,
        R_MAX=R_MAX, WAVE=WAVE, BLOCK=max(1, _FILL_TILE // R_MAX), num_warps=4,
    )  # fmt: skip
    return quota_ER


def reroute(
    ids_TK: Tensor,
    counted: Counted,
    tokens_RE: Tensor,
    quota_ER: Tensor,
    copies: Copies,
    rank: int,
) -> Tensor:
    """`slots_TK`, int64, of this rank's tokens; -1 where `ids_TK` is. counted: of `ids_TK`."""
    R, E = tokens_RE.shape
    slots_TK = torch.empty_like(ids_TK)
    entries = ids_TK.numel()
    if entries:
        R_MAX = _bound(R)
        end_ER = torch.empty_like(quota_ER)
        _shares_kernel[(E,)](tokens_RE, quota_ER, end_ER, rank, R, E, R_MAX=R_MAX, num_warps=4)
        _assign_kernel[(len(counted.before_BE),)](
            ids_TK, counted.places, counted.before_BE, end_ER, copies.slot_ER, slots_TK, entries,
            R, E, BITS=R_MAX.bit_length() - 1, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return slots_TK


def _bound(ranks: int) -> int:
    return max(4, triton.next_power_of_2(ranks))
