# mypy: disable-error-code="no-untyped-def"
"""A kernel that ends on all ranks at about the same time, so that what follows begins together."""

import torch
import triton
import triton.language as tl

from crossdock.bench.rank_world import symmetric_buffer
from crossdock.comm import World
from crossdock.core import CrossdockError
from crossdock.kernels.signals import bases_of_ranks, release

_ROUNDS = 1 << 25
"""Of a wait: some tens of seconds."""


@triton.jit
def _align(table, words, epochs, size, rank, rounds, R_MAX: tl.constexpr):
    """words: int64 [2, R_MAX] by turns, since a rank may be one ahead. epochs: how often this was
    done, and whether a wait gave up."""
    ranks = tl.arange(0, R_MAX)
    epoch = tl.load(epochs) + 1
    turn = (epoch % 2) * R_MAX
    bases = bases_of_ranks(table, ranks, size)
    flags = (bases + (turn + rank) * 8).to(tl.pointer_type(tl.int64))
    release(flags, tl.zeros((R_MAX,), tl.int64) + epoch, ranks < size)
    late, spent = size, 0
    while (late > 0) & (spent < rounds):
        seen = tl.atomic_add(words + turn + ranks, 0, mask=ranks < size, sem="acquire", scope="sys")
        late = tl.sum(((seen != epoch) & (ranks < size)).to(tl.int32), axis=0)
        spent += 1
    tl.store(epochs, epoch)
    if late > 0:
        tl.store(epochs + 1, tl.full((), 1, tl.int64))


class Aligner:
    """Of CUDA ranks; can be captured."""

    def __init__(self, world: World):
        self._rank, self._size = world.rank, world.size
        self._most = max(2, triton.next_power_of_2(world.size))
        self._buffer = symmetric_buffer(world, 2 * self._most * 8)
        self._words = self._buffer.view(0, (2, self._most), torch.int64)
        self._epochs = torch.zeros(2, dtype=torch.int64, device=world.device)

    def __call__(self) -> None:
        _align[(1,)](
            self._buffer.table, self._words, self._epochs, self._size, self._rank, _ROUNDS,
            R_MAX=self._most, num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """
        Raises:
            CrossdockError: a rank did not come to a repetition; the times mean nothing.
        """
        if int(self._epochs[1]):
            raise CrossdockError(f"rank {self._rank} waited for another one in vain")
