# mypy: disable-error-code="no-untyped-def"
"""Which copy of its expert serves each token, from the counts of this very step, on the device.

Of layers whose experts have copies on several ranks. `fill_quotas` says how many of an expert's
tokens each of its ranks serves, so that ranks are loaded evenly; `reroute` how many of them come
from this rank (its own copy first), and which. The algorithms and their sources are those of
`balance.reroute`, whole numbers throughout, so both give the same.

    tokens_RE (6 1) (2 5), expert 0 on both ranks, expert 1 on rank 1
    quotas: expert 0 (7 1), expert 1 (0 6); rank 0 keeps 6, rank 1 sends 1 of its 2 there
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SWEEPS = 2
"""As in `balance.reroute`."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Of one layer. slot_ER: int32, an expert's first slot on each rank, -1 for none. spread_E:
    int32, the experts on several ranks, ascending; num_spread: int32 [1], how many."""

    slot_ER: Tensor
    spread_E: Tensor
    num_spread: Tensor


@triton.jit
def _equal_parts_kernel(tokens_RE, slot_ER, quota_ER, ranks, experts, R_MAX: tl.constexpr):
    e = tl.program_id(0)
    r = tl.arange(0, R_MAX)
    inside = r < ranks
    tokens = tl.sum(tl.load(tokens_RE + r * experts + e, mask=inside, other=0), axis=0)
    host = (tl.load(slot_ER + e * ranks + r, mask=inside, other=-1) >= 0).to(tl.int32)
    count = tl.sum(host, axis=0)
    each = tokens.to(tl.int32) // count
    extra = tl.cumsum(host, axis=0) <= tokens.to(tl.int32) - each * count
    tl.store(quota_ER + e * ranks + r, host * (each + extra.to(tl.int32)), mask=inside)


@triton.jit
def _fill_kernel(
    slot_ER, spread_E, num_spread, quota_ER, ranks, experts, SWEEPS: tl.constexpr,
    R_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, since each expert must know what the ones before it have filled."""
    r = tl.arange(0, R_MAX)
    inside = r < ranks
    load = tl.zeros((R_MAX,), tl.int32)
    at = 0
    while at < experts:
        e = at + tl.arange(0, BLOCK)
        mask = (e < experts)[:, None] & inside[None, :]
        part = tl.load(quota_ER + e[:, None] * ranks + r[None, :], mask=mask, other=0)
        load += tl.sum(part, axis=0)
        at += BLOCK
    num = tl.load(num_spread)
    for _ in tl.static_range(SWEEPS):
        for i in range(0, num):
            row = tl.load(spread_E + i) * ranks + r
            old = tl.load(quota_ER + row, mask=inside, other=0)
            below = tl.load(slot_ER + row, mask=inside, other=-1) >= 0
            tokens = tl.sum(old, axis=0)
            load -= old
            # Raised to one level; ranks above it serve none, and the others are looked at again.
            count = tl.sum(below.to(tl.int32), axis=0)
            total = tokens + tl.sum(tl.where(below, load, 0), axis=0)
            level = total // count
            still = below & (load <= level)
            left = tl.sum(still.to(tl.int32), axis=0)
            while left < count:
                below = still
                count = left
                total = tokens + tl.sum(tl.where(below, load, 0), axis=0)
                level = total // count
                still = below & (load <= level)
                left = tl.sum(still.to(tl.int32), axis=0)
            extra = below & (tl.cumsum(below.to(tl.int32), axis=0) <= total - level * count)
            new = tl.where(below, level - load, 0) + extra.to(tl.int32)
            tl.store(quota_ER + row, new, mask=inside)
            load += new
        tl.debug_barrier()  # the next sweep reads what this one wrote


@triton.jit
def _assign_kernel(
    ids, tokens_RE, quota_ER, slot_ER, slots, entries, rank, ranks, experts, R_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes an expert and looks for its tokens in order."""
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
    place = tl.sum((larger | first).to(tl.int64), axis=1)
    part += (place < left - tl.sum(part, axis=0)).to(tl.int64)
    end = tl.cumsum(part + tl.where(r == rank, own, 0), axis=0).to(tl.int32)
    seen = 0
    at = 0
    while at < entries:
        entry = at + tl.arange(0, BLOCK)
        hit = tl.load(ids + entry, mask=entry < entries, other=-1) == e
        index = seen + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        passed = tl.sum((end[None, :] <= index[:, None]).to(tl.int32), axis=1)
        slot = tl.load(slot_ER + e * ranks + passed, mask=hit, other=-1)
        tl.store(slots + entry, slot.to(tl.int64), mask=hit)
        seen += tl.sum(hit.to(tl.int32), axis=0)
        at += BLOCK


def fill_quotas(tokens_RE: Tensor, copies: Copies, sweeps: int = SWEEPS) -> Tensor:
    """`quota_ER`, int32: tokens of each expert that each rank serves. tokens_RE: int64, contiguous,
    what the tokens of each rank chose."""
    (R, E), device = tokens_RE.shape, tokens_RE.device
    quota_ER = torch.empty(E, R, dtype=torch.int32, device=device)
    R_MAX = triton.next_power_of_2(R)
    _equal_parts_kernel[(E,)](tokens_RE, copies.slot_ER, quota_ER, R, E, R_MAX=R_MAX, num_warps=1)
    _fill_kernel[(1,)](
        copies.slot_ER, copies.spread_E, copies.num_spread, quota_ER, R, E, SWEEPS=sweeps,
        R_MAX=R_MAX, BLOCK=max(1, 512 // R_MAX), num_warps=1,
    )  # fmt: skip
    return quota_ER


def reroute(
    ids_TK: Tensor, tokens_RE: Tensor, quota_ER: Tensor, copies: Copies, rank: int
) -> Tensor:
    """`slots_TK`, int64, of this rank's tokens; -1 where `ids_TK` (int64, contiguous) is."""
    R, E = tokens_RE.shape
    slots_TK = torch.full_like(ids_TK, -1)
    if ids_TK.numel():
        _assign_kernel[(E,)](
            ids_TK, tokens_RE, quota_ER, copies.slot_ER, slots_TK, ids_TK.numel(), rank, R, E,
            R_MAX=triton.next_power_of_2(R), BLOCK=256, num_warps=4,
        )  # fmt: skip
    return slots_TK
