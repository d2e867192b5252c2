"""The transport of CPU ranks on one host: rows written straight into the peers' shared buffers.

One-sided: a sender owns a region in every peer's buffer, writes rows there and then releases a flag
that holds the number of the exchange and the count of rows; nobody is asked. Per rank d, source s:

    dispatch   rows[set, d, s, :count]   the rows s sends to d, each once, and their metadata
    combine    home[set, d, cell]        ordinary: cell (s, position in what d had sent to s)
                                         per_expert: cell (token, k), whoever holds the expert

Two sets suffice, without acknowledgements, because every rank raises a flag for every other in
every dispatch and combine, even for no rows, and nobody begins dispatch e before it has ended
combine e-2:
- Dispatch e overwrites what peer d read in e-2. We have d's flag of combine e-2, which d raised
  after dispatch_end(e-2), and dispatch_end copies the rows out.
- Combine e overwrites what home h read in combine e-2. We have h's flag of dispatch e, which h
  raised after its combine_end(e-2).
Flags come last because x86-64 keeps stores, and loads, in program order
(`require_total_store_order`).

numpy rather than torch: a step on the CPU is many small operations, and numpy's cost half.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdock.comm.paths import PathBytes
from crossdock.comm.shared import SETS, SharedMemory, ShmLayout, require_total_store_order
from crossdock.comm.sums import sum_rows, weigh_and_sum
from crossdock.comm.waiting import Waiter
from crossdock.core import CapacityError, CrossdockError, Routing, Rows
from crossdock.metrics import Recorder

_DISPATCH, _COMBINE = range(2)
_COUNT_BITS = 24
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_WORD: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.float32)}


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """M (rank, token) pairs, by rank, then token; those of rank r start at `starts[r]`."""

    epoch: int
    x_TH: Tensor
    routing: Routing
    meta_TW: np.ndarray
    rank_M: np.ndarray
    token_M: np.ndarray
    starts: list[int]


@dataclass(frozen=True, eq=False)
class ShmTicket:
    """`counts`: rows received from each rank. `token_N`: their index at home."""

    sent: _Dispatch
    counts: list[int]
    token_N: np.ndarray
    slots_NK: np.ndarray


class ShmTransport:
    """See the module. `x_TH` must stay as it is from dispatch_begin to dispatch_end."""

    def __init__(
        self,
        rank: int,
        layout: ShmLayout,
        memory: SharedMemory,
        slots_per_rank: int,
        dtype: torch.dtype,
        paths: PathBytes,
        waiter: Waiter,
        recorder: Recorder,
    ):
        require_total_store_order()
        if layout.nbytes > memory.nbytes:
            raise CapacityError(
                f"the shm transport needs {layout.nbytes} bytes of shared memory, "
                f"{memory.nbytes} were created; shm_bytes() tells the size"
            )
        if dtype.itemsize not in _WORD or layout.max_tokens > _COUNT_MASK:
            raise CapacityError(
                f"the shm transport takes 2- and 4-byte floats and up to {_COUNT_MASK} tokens, "
                f'got {dtype} and {layout.max_tokens}; set transport = "collective"'
            )
        self.per_expert, self.on_device = layout.per_expert, False
        self.max_tokens = layout.max_tokens
        self._rank, self._size, self._slots = rank, layout.ranks, slots_per_rank
        self._hidden, self._top_k = layout.hidden, layout.top_k
        self._dtype, self._word = dtype, _WORD[dtype.itemsize]
        self._paths, self._waiter, self._recorder = paths, waiter, recorder
        self._row_bytes = layout.hidden * dtype.itemsize
        size, tokens = layout.ranks, layout.max_tokens
        self._flags = memory.words(layout.flags, 2 * SETS * size * size)
        self._meta = memory.array(
            layout.meta, (SETS, size, size, tokens, layout.meta_words), np.dtype(np.int64)
        )
        self._rows = memory.array(
            layout.rows, (SETS, size, size, tokens, layout.hidden), self._word
        )
        self._home = memory.array(
            layout.home, (SETS, size, layout.cells, layout.hidden), self._word
        )
        self._home_CH = [torch.from_numpy(self._home[s, rank]).view(dtype) for s in range(SETS)]
        self._token_T1 = np.arange(tokens)[:, None]
        self._peers = [(rank + i) % size for i in range(1, size)]
        self._epoch = 0
        self._in_flight = [False] * SETS

    def dispatch_begin(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> _Dispatch:
        """
        Raises:
            CapacityError: more tokens than the buffers were made for.
        """
        tokens = x_TH.shape[0]
        self._check(x_TH)
        epoch = self._epoch + 1
        buffer_set = epoch % SETS
        if self._in_flight[buffer_set]:
            raise CrossdockError(f"dispatch {epoch} begins before combine {epoch - SETS} has ended")
        size = self._size
        slots_TK, x = routing.slots_TK.numpy(), self._words(x_TH)
        # Row R takes the -1s; what remains says which rank needs which token, once.
        hit_RT = np.zeros((size + 1, tokens), np.bool_)
        hit_RT[slots_TK // self._slots, self._token_T1[:tokens]] = True
        rank_M, token_M = hit_RT[:size].nonzero()
        starts = np.searchsorted(rank_M, np.arange(size + 1)).tolist()
        meta_TW = np.empty((tokens, self._meta.shape[-1]), np.int64)
        meta_TW[:, :1] = self._token_T1[:tokens]
        meta_TW[:, 1 : 1 + self._top_k] = slots_TK
        self._weights(meta_TW)[...] = routing.weights_TK.numpy()
        self._epoch, self._in_flight[buffer_set] = epoch, True
        rows, meta, me = self._rows[buffer_set], self._meta[buffer_set], self._rank
        for peer in self._peers:
            start, end = starts[peer], starts[peer + 1]
            if end > start:
                index, n = token_M[start:end], end - start
                x.take(index, 0, rows[peer, me, :n], "clip")
                meta_TW.take(index, 0, meta[peer, me, :n], "clip")
            self._release(_DISPATCH, epoch, peer, end - start)
        counts = [starts[r + 1] - starts[r] for r in range(size)]
        self._release(_DISPATCH, epoch, me, counts[me])
        self._paths.add(counts, self._row_bytes)
        return _Dispatch(epoch, x_TH, routing, meta_TW, rank_M, token_M, starts)

    def dispatch_end(self, pending: _Dispatch) -> tuple[Rows, ShmTicket]:
        """
        Raises:
            RankLost: a rank did not come within the deadline.
        """
        counts = self._await(_DISPATCH, pending.epoch)
        buffer_set, me = pending.epoch % SETS, self._rank
        rows, meta = self._rows[buffer_set, me], self._meta[buffer_set, me]
        total = sum(counts)
        x_NH = torch.empty(total, self._hidden, dtype=self._dtype)
        x, meta_NW = self._words(x_NH), np.empty((total, meta.shape[-1]), np.int64)
        at = 0
        for source, n in enumerate(counts):
            if not n:
                continue
            if source == me:  # these never left
                index = pending.token_M[pending.starts[me] : pending.starts[me + 1]]
                self._words(pending.x_TH).take(index, 0, x[at : at + n], "clip")
                pending.meta_TW.take(index, 0, meta_NW[at : at + n], "clip")
            else:
                x[at : at + n] = rows[source, :n]
                meta_NW[at : at + n] = meta[source, :n]
            at += n
        slots_NK = meta_NW[:, 1 : 1 + self._top_k] - me * self._slots
        foreign_NK = slots_NK.view(np.uint64) >= self._slots
        slots_NK[foreign_NK] = -1
        weights_NK = self._weights(meta_NW).copy()
        weights_NK[foreign_NK] = 0.0
        received = Rows(x_NH, torch.from_numpy(slots_NK), torch.from_numpy(weights_NK))
        return received, ShmTicket(pending, counts, meta_NW[:, 0], slots_NK)

    def dispatch(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Rows, ShmTicket]:
        return self.dispatch_end(self.dispatch_begin(x_TH, routing, most_tokens))

    def combine_begin(self, y: Tensor, ticket: ShmTicket) -> ShmTicket:
        values = self._words(y.to(self._dtype).contiguous())
        epoch, me = ticket.sent.epoch, self._rank
        home = self._home[epoch % SETS]
        ends = np.cumsum(ticket.counts).tolist()
        moved = ticket.counts
        if self.per_expert:
            moved = self._scatter_entries(values, ticket, home, ends)
        first = me * self.max_tokens
        for peer in (*self._peers, me):
            n, end = ticket.counts[peer], ends[peer]
            if n and not self.per_expert:
                home[peer, first : first + n] = values[end - n : end]
            self._release(_COMBINE, epoch, peer, n)
        self._paths.add(moved, self._row_bytes)
        return ticket

    def combine_end(self, pending: ShmTicket) -> Tensor:
        """
        Raises:
            RankLost: a rank did not come within the deadline.
        """
        sent = pending.sent
        buffer_set, tokens = sent.epoch % SETS, sent.x_TH.shape[0]
        home_CH = self._home_CH[buffer_set]
        if self.per_expert:
            self._await(_COMBINE, sent.epoch)
            y_TKH = home_CH[: tokens * self._top_k].view(tokens, self._top_k, self._hidden)
            out = weigh_and_sum(y_TKH, sent.routing.weights_TK, sent.routing.slots_TK)
        else:
            # By token, then rank: the order of the sum. All this is done while rows are on the way.
            starts_R = np.array(sent.starts[:-1])
            order_M = sent.token_M.argsort(kind="stable")
            position_M = np.arange(len(order_M)) - starts_R[sent.rank_M]
            cell_M = (sent.rank_M * self.max_tokens + position_M)[order_M]
            offsets_T = sent.token_M[order_M].searchsorted(self._token_T1[:tokens, 0])
            index, offsets = torch.from_numpy(cell_M), torch.from_numpy(offsets_T)
            self._await(_COMBINE, sent.epoch)
            out = sum_rows(home_CH, index, offsets, self._dtype)
        self._in_flight[buffer_set] = False
        return out

    def combine(self, y: Tensor, ticket: ShmTicket) -> Tensor:
        return self.combine_end(self.combine_begin(y, ticket))

    def bytes_sent(self) -> dict[str, int]:
        return self._paths.totals()

    def check(self) -> None:
        """Errors have been raised where they came up."""

    def close(self) -> None:
        """The memory ends with its last mapping."""

    def _scatter_entries(
        self, values: np.ndarray, ticket: ShmTicket, home: np.ndarray, ends: list[int]
    ) -> list[int]:
        """Writes each (row, k) of this rank's experts into its cell at home; rows per peer."""
        values = values.reshape(-1, self._hidden)
        row_V, k_V = (ticket.slots_NK >= 0).nonzero()
        cell_V = ticket.token_N[row_V] * self._top_k + k_V
        entry_V = row_V * self._top_k + k_V
        bounds = [0, *row_V.searchsorted(ends).tolist()]
        for peer in range(self._size):
            start, end = bounds[peer], bounds[peer + 1]
            if end > start:
                home[peer][cell_V[start:end]] = values[entry_V[start:end]]
        return [bounds[r + 1] - bounds[r] for r in range(self._size)]

    def _check(self, x_TH: Tensor) -> None:
        if x_TH.shape[0] > self.max_tokens:
            raise CapacityError(
                f"{x_TH.shape[0]} tokens in a step, the buffers hold {self.max_tokens} per rank "
                "(max_num_batched_tokens)"
            )
        if x_TH.shape[1] != self._hidden or x_TH.dtype != self._dtype:
            raise ValueError(
                f"rows of {x_TH.shape[1]} {x_TH.dtype}, expected {self._hidden} {self._dtype}"
            )

    def _words(self, x: Tensor) -> np.ndarray:
        """numpy knows no bfloat16: rows travel as the words they are made of."""
        return x.numpy() if self._word == np.float32 else x.view(torch.int16).numpy()

    def _weights(self, meta_NW: np.ndarray) -> np.ndarray:
        return meta_NW[:, 1 + self._top_k :].view(np.float32)[:, : self._top_k]

    def _flag(self, kind: int, epoch: int, dst: int) -> int:
        """Index of the first of R flags, one per source."""
        return ((kind * SETS + epoch % SETS) * self._size + dst) * self._size

    def _release(self, kind: int, epoch: int, dst: int, count: int) -> None:
        self._flags[self._flag(kind, epoch, dst) + self._rank] = (epoch << _COUNT_BITS) | count

    def _await(self, kind: int, epoch: int) -> list[int]:
        """Waits for the flags of all ranks; the counts in them."""
        flags, base, size = self._flags, self._flag(kind, epoch, self._rank), self._size
        seen = 0

        def ready() -> bool:
            nonlocal seen
            while seen < size:
                if flags[base + seen] >> _COUNT_BITS != epoch:
                    return False
                seen += 1
            return True

        def missing() -> list[int]:
            return [r for r in range(size) if flags[base + r] >> _COUNT_BITS != epoch]

        what = f"{'combine' if kind else 'dispatch'} {epoch}"
        self._recorder.observe("wait", self._waiter.wait(ready, missing, what))
        return [flag & _COUNT_MASK for flag in flags[base : base + size]]
