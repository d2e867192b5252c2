"""The portable transport: all-to-all of torch.distributed over any backend. Counts first, then
exactly as many rows as there are; the oracle of the others."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.comm.lockstep import broken
from crossdock.comm.paths import PathBytes
from crossdock.comm.sums import sum_rows, weigh_and_sum
from crossdock.comm.waiting import Waiter
from crossdock.core import Routing, Rows
from crossdock.metrics import Recorder


@dataclass(frozen=True, eq=False)
class CollectiveTicket:
    """M rows sent, N received. Per peer: rows sent and received; in per_expert mode `*_entries`,
    the (row, k) pairs among them."""

    routing: Routing
    dtype: torch.dtype
    dest_TK: Tensor
    token_M: Tensor
    rows_out: list[int]
    rows_in: list[int]
    entries_out: list[int]
    entries_in: list[int]
    slots_NK: Tensor


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """`works` are in flight and read from `sent`, which must live as long."""

    ticket: CollectiveTicket
    works: list[Any]
    sent: tuple[Tensor, ...]
    x_NH: Tensor
    weights_NK: Tensor


@dataclass(frozen=True, eq=False)
class _Combine:
    ticket: CollectiveTicket
    work: Any
    sent: Tensor
    home_MH: Tensor


class CollectiveTransport:
    """`group`: a process group object (gloo or NCCL), used by this transport alone."""

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        slots_per_rank: int,
        per_expert: bool,
        paths: PathBytes,
        waiter: Waiter,
        recorder: Recorder,
    ):
        self.per_expert, self.on_device = per_expert, False
        self.max_tokens = None
        self._group, self._rank, self._size, self._slots = group, rank, size, slots_per_rank
        self._paths, self._waiter, self._recorder = paths, waiter, recorder

    def dispatch_begin(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> _Dispatch:
        size, slots_TK = self._size, routing.slots_TK
        dest_TK = torch.div(slots_TK, self._slots, rounding_mode="floor")
        # Column R takes the -1s; what remains says which rank needs which token, once.
        hit_TR = torch.zeros(x_TH.shape[0], size + 1, dtype=torch.bool, device=x_TH.device)
        hit_TR.scatter_(1, dest_TK.masked_fill(dest_TK < 0, size), True)
        rank_M, token_M = hit_TR[:, :size].t().nonzero().unbind(1)
        rows_R = torch.bincount(rank_M, minlength=size)
        entries_R = torch.bincount(dest_TK[dest_TK >= 0], minlength=size)
        counts_R2 = torch.stack((rows_R, entries_R), dim=1)
        incoming_R2 = torch.empty_like(counts_R2)
        start = time.perf_counter()
        self._finish([self._exchange(incoming_R2, counts_R2, [1] * size, [1] * size)], "dispatch")
        rows_out, entries_out = counts_R2.t().tolist()
        rows_in, entries_in = incoming_R2.t().tolist()
        self._recorder.observe("wait", time.perf_counter() - start)
        sent = tuple(
            t.index_select(0, token_M) for t in (x_TH, slots_TK, routing.weights_TK.float())
        )
        got = tuple(t.new_empty(sum(rows_in), t.shape[1]) for t in sent)
        works = [self._exchange(o, i, rows_in, rows_out) for o, i in zip(got, sent, strict=True)]
        self._paths.add(rows_out, x_TH.shape[1] * x_TH.element_size())
        ticket = CollectiveTicket(
            routing,
            x_TH.dtype,
            dest_TK,
            token_M,
            rows_out,
            rows_in,
            entries_out,
            entries_in,
            got[1],
        )
        return _Dispatch(ticket, works, sent, got[0], got[2])

    def dispatch_end(self, pending: _Dispatch) -> tuple[Rows, CollectiveTicket]:
        self._wait(pending.works, "dispatch")
        slots_NK = pending.ticket.slots_NK.sub_(self._rank * self._slots)
        foreign_NK = (slots_NK < 0) | (slots_NK >= self._slots)
        slots_NK.masked_fill_(foreign_NK, -1)
        weights_NK = pending.weights_NK.masked_fill_(foreign_NK, 0.0)
        return Rows(pending.x_NH, slots_NK, weights_NK), pending.ticket

    def dispatch(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Rows, CollectiveTicket]:
        return self.dispatch_end(self.dispatch_begin(x_TH, routing, most_tokens))

    def combine_begin(self, y: Tensor, ticket: CollectiveTicket) -> _Combine:
        out, back = ticket.rows_in, ticket.rows_out
        y = y.to(ticket.dtype)
        if self.per_expert:
            out, back = ticket.entries_in, ticket.entries_out
            entries = (ticket.slots_NK >= 0).view(-1).nonzero().view(-1)
            y = y.reshape(-1, y.shape[-1]).index_select(0, entries)
        y = y.contiguous()
        home_MH = y.new_empty(sum(back), y.shape[-1])
        work = self._exchange(home_MH, y, back, out)
        self._paths.add(out, y.shape[-1] * y.element_size())
        return _Combine(ticket, work, y, home_MH)

    def combine_end(self, pending: _Combine) -> Tensor:
        self._wait([pending.work], "combine")
        ticket, home_MH = pending.ticket, pending.home_MH
        tokens, top_k = ticket.dest_TK.shape
        if self.per_expert:
            ranks_R = torch.arange(self._size, device=home_MH.device)
            _, token, k = (ticket.dest_TK == ranks_R[:, None, None]).nonzero().unbind(1)
            cells_CH = home_MH.new_zeros(tokens * top_k, home_MH.shape[1])
            cells_CH[token * top_k + k] = home_MH
            y_TKH = cells_CH.view(tokens, top_k, home_MH.shape[1])
            return weigh_and_sum(y_TKH, ticket.routing.weights_TK, ticket.routing.slots_TK)
        # Rows came in rank order; a stable sort by token keeps that order within each token.
        index_M = torch.sort(ticket.token_M, stable=True)[1]
        count_T = torch.zeros(tokens, dtype=torch.int64, device=home_MH.device)
        count_T.scatter_add_(0, ticket.token_M, torch.ones_like(ticket.token_M))
        return sum_rows(home_MH, index_M, count_T.cumsum(0) - count_T, ticket.dtype)

    def combine(self, y: Tensor, ticket: CollectiveTicket) -> Tensor:
        return self.combine_end(self.combine_begin(y, ticket))

    def bytes_sent(self) -> dict[str, int]:
        return self._paths.totals()

    def check(self) -> None:
        """Errors have been raised where they came up."""

    def close(self) -> None:
        pass

    def _exchange(self, out: Tensor, inp: Tensor, rows_in: list[int], rows_out: list[int]) -> Any:
        try:
            return self._group.alltoall_base(out, inp, rows_in, rows_out, dist.AllToAllOptions())
        except RuntimeError as error:
            raise broken(error, self._waiter, "an all-to-all") from error

    def _wait(self, works: list[Any], what: str) -> None:
        start = time.perf_counter()
        self._finish(works, what)
        self._recorder.observe("wait", time.perf_counter() - start)

    def _finish(self, works: list[Any], what: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise broken(error, self._waiter, what) from error
