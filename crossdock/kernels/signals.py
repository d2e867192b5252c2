# mypy: disable-error-code="no-untyped-def"
"""Flags between ranks: released after rows, waited for with an end.

A flag is an int64 in the waiting rank's memory: the epoch of the exchange, shifted left by
COUNT_BITS where a count travels with it. Epochs live in device memory, so that a captured graph can
be replayed: a kernel that sends reads word 0, raises with word 0 + 1 and leaves that in word 1;
the kernel that receives reads word 1 and leaves it in word 0. No launch reads the word it writes,
except those that send and receive in one: there the last program to have read it (word 2 counts
them) leaves it for the next launch.

A wait that passes the limit writes `error` (device) and `mirror` (the host sees it without asking
the device) and gives up; those after it give up at once. The word is stage << 32 | peer + 1, or for
what cannot be served kind << 32 | number + 1. The first one stays.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

COUNT_BITS = 24
COUNT_SHIFT = tl.constexpr(COUNT_BITS)
COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)

STAGES = {1: "dispatch", 2: "combine", 5: "an exchange of counts"}
BAD_SLOT, SLOT_FULL = 3, 4
"""Kinds of error that are no stage; their numbers are a token and a source."""
_BAD_SLOT, _SLOT_FULL = tl.constexpr(BAD_SLOT), tl.constexpr(SLOT_FULL)


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
def fail(error, mirror, kind, number):
    """The first call of all stays."""
    code = (tl.full((), kind, tl.int64) << 32) | (number + 1)
    tl.atomic_cas(error, tl.full((), 0, tl.int64), code)
    tl.store(mirror, tl.load(error, volatile=True))


@triton.jit
def settle(epochs, epoch, programs):
    """Called once by each program of a launch that sends and receives, after it read `epoch`."""
    tl.debug_barrier()  # all its warps have read it
    # The addend hangs on the epoch, so that it is there before the count rises.
    before = tl.atomic_add(epochs + 2, tl.where(epoch < 0, 0, 1).to(tl.int64), sem="relaxed")
    if before == programs - 1:
        tl.store(epochs, epoch)
        tl.store(epochs + 1, epoch)
        tl.store(epochs + 2, tl.full((), 0, tl.int64))


@triton.jit
def _left(words, want, shifts, first, COUNTED: tl.constexpr):
    late = (words >> shifts) != want
    if COUNTED:
        head = tl.arange(0, words.shape[0]) == 0
        # A count that is not there yet excuses nobody.
        count = tl.sum(tl.where(head, tl.where(late, 1 << 24, words & COUNT_MASK), 0), axis=0)
        late = late & (first < count)
    return late


@triton.jit
def wait(
    flags, peers, want, shifts, first, error, mirror, limit, STAGE: tl.constexpr,
    COUNTED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Until all flags hold epoch `want` (above `shifts` bits), or for `limit`: ns, in the
    interpreter rounds. Returns the flags. COUNTED: the first flag carries a count, and those whose
    `first` token is not below it are not waited for."""
    words = _acquire(flags, INTERPRET)
    late = _left(words, want, shifts, first, COUNTED)
    left = tl.sum(late.to(tl.int32), axis=0)
    if left > 0:
        spent = tl.full((), 0, tl.int64)
        rounds = tl.full((), 0, tl.int32)
        if not INTERPRET:
            start = globaltimer()
        while (left > 0) & (spent < limit):
            words = _acquire(flags, INTERPRET)
            late = _left(words, want, shifts, first, COUNTED)
            left = tl.sum(late.to(tl.int32), axis=0)
            rounds += 1
            if rounds % 32 == 0:  # seldom, since each look costs as much as a round
                if INTERPRET:
                    spent += 32
                else:
                    spent = globaltimer() - start
                spent = tl.where(tl.load(error, volatile=True) != 0, limit, spent)
        if left > 0:
            fail(error, mirror, STAGE, tl.min(tl.where(late, peers, 1 << 30), axis=0))
    tl.debug_barrier()  # keeps loads of rows behind it
    return words
