# mypy: disable-error-code="no-untyped-def"
"""Flags between ranks: released after rows, waited for with an end.

A flag is an int64 in the waiting rank's memory: the epoch of the exchange, shifted left by
COUNT_BITS where a count travels with it. Epochs live in device memory, so that a captured graph can
be replayed: a kernel that sends reads word 0, raises with word 0 + 1 and leaves that in word 1; the
kernel that receives reads word 1 and leaves it in word 0. No launch reads the word it writes.

A wait that passes the limit writes `error` (device) and `mirror` (the host sees it without asking
the device) and gives up; those after it give up at once. The word is stage << 32 | peer + 1.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

COUNT_BITS = 24
COUNT_SHIFT = tl.constexpr(COUNT_BITS)
COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)

STAGES = {1: "dispatch", 2: "combine"}


@triton.jit
def bases_of_ranks(table, ranks, size):
    """Where the memory of each rank begins; those beyond the last are the last again."""
    return tl.load(table + tl.minimum(ranks, size - 1))


@triton.jit
def pointer_at(base, offset, dtype: tl.constexpr):
    """offset in bytes, a multiple of 16."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def announce(flags, value, mask):
    """Raises words that no rows hang on."""
    tl.atomic_xchg(flags, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def release(flags, value, mask):
    """Raises flags; whoever acquires one sees all that this program stored before."""
    tl.debug_barrier()  # of all threads, not of those alone that raise
    tl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")


@triton.jit
def _acquire(flags, INTERPRET: tl.constexpr):
    if INTERPRET:
        return tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [flags.to(tl.int64)], dtype=tl.int64,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(
    flags, peers, want, error, mirror, limit, STAGE: tl.constexpr, INTERPRET: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Until all flags hold epoch `want` (above SHIFT bits), or for `limit`: ns, in the interpreter
    rounds. Returns the flags."""
    words = _acquire(flags, INTERPRET)
    left = tl.sum(((words >> SHIFT) != want).to(tl.int32), axis=0)
    if left > 0:
        spent = tl.full((), 0, tl.int64)
        if not INTERPRET:
            start = globaltimer()
        while (left > 0) & (spent < limit):
            words = _acquire(flags, INTERPRET)
            left = tl.sum(((words >> SHIFT) != want).to(tl.int32), axis=0)
            if INTERPRET:
                spent += 1
            else:
                spent = globaltimer() - start
            spent = tl.where(tl.load(error, volatile=True) != 0, limit, spent)
        if left > 0:
            peer = tl.min(tl.where((words >> SHIFT) != want, peers, 1 << 30), axis=0)
            code = (tl.full((), STAGE, tl.int64) << 32) | (peer + 1)
            tl.atomic_cas(error, tl.full((), 0, tl.int64), code)
            tl.store(mirror, tl.load(error, volatile=True))
    tl.debug_barrier()  # keeps loads of rows behind it
    return words
