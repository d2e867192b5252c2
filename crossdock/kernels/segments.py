# mypy: disable-error-code="no-untyped-def"
"""The local pass of normal mode: which received rows each slot works on, without the host.

slots [N=3, K=2] = (0 2), (-1 -1), (2 0); alignment 4
counts 2 0 2, offsets 0 4 4 8, rows 0 2 -1 -1 | 0 2 -1 -1 (within a slot in any order)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def place_rows(
    slots, counts, cursors, offsets, rows, places, entries, top_k, num_slots, capacity, alignment,
    S_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """slots int64 [N, K], counts and cursors int32 [S] (cursors zero). Writes int32: offsets
    [S + 1], rows [capacity] (row n of each place, -1 for alignment), places [N, K] (-1: none)."""
    program = tl.program_id(0)
    s = tl.arange(0, S_MAX)
    count_S = tl.load(counts + s, mask=s < num_slots, other=0)
    aligned_S = (count_S + alignment - 1) // alignment * alignment
    end_S = tl.cumsum(aligned_S, axis=0)
    start_S = end_S - aligned_S
    if program == 0:
        tl.store(offsets + s, start_S, mask=s < num_slots)
        tl.store(offsets + num_slots, tl.sum(aligned_S, axis=0))
    # Each program fills its share of the rows that align: those of slots program, program + G, ...
    slot = program
    while slot < num_slots:
        first = tl.sum(tl.where(s == slot, start_S + count_S, 0), axis=0)
        end = tl.sum(tl.where(s == slot, end_S, 0), axis=0)
        at = first
        while at < end:
            index = at + tl.arange(0, 128)
            tl.store(rows + index, tl.full((128,), -1, tl.int32), mask=index < end)
            at += 128
        slot += tl.num_programs(0)
    at = program * BLOCK
    while at < entries:
        entry = at + tl.arange(0, BLOCK)
        chosen = tl.load(slots + entry, mask=entry < entries, other=-1).to(tl.int32)
        here = chosen >= 0
        start = tl.gather(start_S, tl.where(here, chosen, 0), axis=0)
        place = start + tl.atomic_add(cursors + chosen, 1, mask=here, sem="relaxed")
        tl.store(rows + place, entry // top_k, mask=here & (place < capacity))
        tl.store(places + entry, tl.where(here, place, -1), mask=entry < entries)
        at += tl.num_programs(0) * BLOCK


def place_rows_torch(slots_NK: Tensor, num_slots: int, alignment: int) -> tuple[Tensor, ...]:
    """Twin: `(counts_S, offsets, rows, places_NK)`, rows of a slot in ascending order."""
    top_k = slots_NK.shape[1]
    flat = slots_NK.reshape(-1)
    counts_S = torch.bincount(flat[flat >= 0], minlength=num_slots)
    ends_S = ((counts_S + alignment - 1) // alignment * alignment).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends_S))
    rows = torch.full((int(ends_S[-1]),), -1, dtype=torch.int64)
    places = torch.full_like(flat, -1)
    for slot in range(num_slots):
        entries = (flat == slot).nonzero().view(-1)
        at = torch.arange(len(entries)) + offsets[slot]
        rows[at] = torch.div(entries, top_k, rounding_mode="floor")
        places[entries] = at
    return counts_S, offsets, rows, places.view_as(slots_NK)
