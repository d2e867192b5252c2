# mypy: disable-error-code="no-untyped-def"
"""Counts of all ranks to all ranks, in one launch: pushed, flagged, waited for and copied out.

A program serves one rank to push to and one to wait for. Program p of rank r pushes to rank r + p
and waits for rank r - p, whose program p pushes here: so programs may also run one after another.

    rank 1 of 3, counts (4 0): row 1 of all ranks becomes (4 0), and tokens_RE is what its own
    memory then holds, row 0 and row 2 written by the others
"""

import triton
import triton.language as tl

from crossdock.kernels.signals import pointer_at, release, settle, wait


@triton.jit
def exchange_counts(
    counts_E, tokens_RE, table, epochs, size, rank, experts, set_bytes, off_rows, row_bytes, error,
    mirror, limit, E_MAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Launched with `size` programs, which spin at the same time.

    counts_E, tokens_RE: int32. table: int64 [R], where each rank's buffer lies. A buffer has two
    sets of `set_bytes`: flags, int64 [R] by source, and at `off_rows` rows of `row_bytes`.
    epochs: int64 [3], see `kernels.signals`; the parity of the exchange is its set.
    """
    program = tl.program_id(0)
    target = (rank + program) % size
    source = (rank + size - program) % size
    epoch = tl.load(epochs) + 1
    start = (epoch & 1) * set_bytes
    e = tl.arange(0, E_MAX)
    inside = e < experts
    lanes = tl.arange(0, 8)
    counts = tl.load(counts_E + e, mask=inside, other=0)
    there = tl.load(table + target)
    row = pointer_at(there, start + off_rows + rank * row_bytes, tl.int32)
    tl.store(row + e, counts, mask=inside)
    flags = pointer_at(there, start, tl.int64) + rank + lanes * 0
    release(flags, tl.zeros((8,), tl.int64) + epoch, lanes == 0)
    here = tl.load(table + rank)
    words = pointer_at(here, start, tl.int64) + source + lanes * 0
    wait(words, source + lanes * 0, epoch, 0, 0, error, mirror, limit, 5, False, INTERPRET)
    came = pointer_at(here, start + off_rows + source * row_bytes, tl.int32)
    tl.store(tokens_RE + source * experts + e, tl.load(came + e, mask=inside), mask=inside)
    settle(epochs, epoch, size)
