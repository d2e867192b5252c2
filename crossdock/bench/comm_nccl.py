"""What else moves the same rows: NCCL's all-to-all of what each rank needs; all rows to all ranks
(all-gather, and reduce-scatter home, as vLLM does by default); and a plain copy over the link."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.bench.comm_case import (
    ASKED,
    COPY_BYTES,
    GATHER,
    KNOWN,
    SCATTER,
    CommCase,
    Inputs,
)
from crossdock.bench.meter import Work
from crossdock.bench.rank_world import symmetric_buffer
from crossdock.comm import World
from crossdock.comm.sums import sum_rows
from crossdock.kernels.quant import quantise_rows


class NcclExchange:
    """Sizes known: index tensors and counts are ready; timed are the gather of the rows, their
    quantisation where they are FP8, the all-to-all and, at home, the sums."""

    def __init__(self, case: CommCase, group: Any, inputs: Inputs):
        self._case, self._group, self._x_TH = case, group, inputs.x_TH
        self._slots_TK = inputs.routing.slots_TK
        self._token_M, rows_R = self._plan()
        self._rows_in = self._exchange_counts(rows_R).tolist()
        self._rows_out = rows_R.tolist()
        self._order_M = torch.sort(self._token_M, stable=True)[1]
        count_T = torch.bincount(self._token_M, minlength=case.tokens)
        self._offsets_T = count_T.cumsum(0) - count_T
        device = self._x_TH.device
        self._y_NH = torch.randn(sum(self._rows_in), case.hidden, device=device).bfloat16()
        self._all_RTH = torch.randn(case.ranks * case.tokens, case.hidden, device=device).bfloat16()

    def works(self) -> dict[tuple[str, str], Work]:
        """By who and what."""
        works = {
            (KNOWN, "dispatch"): Work(lambda i: self._send(self._token_M)),
            (ASKED, "dispatch"): Work(lambda i: self._ask_and_send(), graph=False),
        }
        if not self._case.fp8:  # rows come home, and are gathered, in BF16
            works[KNOWN, "combine"] = Work(lambda i: self._home())
            works[GATHER, "dispatch"] = Work(lambda i: self._all_gather())
            works[SCATTER, "combine"] = Work(lambda i: self._reduce_scatter())
        library = "NCCL" if self._x_TH.is_cuda else "gloo"
        return {(f"{library} {who}", what): work for (who, what), work in works.items()}

    def _plan(self) -> tuple[Tensor, Tensor]:
        """Tokens in the order of the ranks they go to, once per rank, and how many each gets."""
        slots_TK = self._slots_TK
        hit_TR = torch.zeros(
            len(slots_TK), self._case.ranks, dtype=torch.bool, device=slots_TK.device
        )
        hit_TR.scatter_(1, slots_TK // self._case.slots, True)
        return hit_TR.t().nonzero().unbind(1)[1], hit_TR.sum(0)

    def _exchange_counts(self, rows_R: Tensor) -> Tensor:
        incoming_R, ones = torch.empty_like(rows_R), [1] * self._case.ranks
        self._all_to_all(incoming_R, rows_R, ones, ones)
        return incoming_R

    def _ask_and_send(self) -> None:
        token_M, rows_R = self._plan()
        incoming_R = self._exchange_counts(rows_R)
        self._rows_out, self._rows_in = torch.stack((rows_R, incoming_R)).tolist()
        self._send(token_M)

    def _send(self, token_M: Tensor) -> None:
        rows_MH = self._x_TH.index_select(0, token_M)
        for part in quantise_rows(rows_MH) if self._case.fp8 else (rows_MH,):
            sent = part.view(torch.uint8) if self._case.fp8 else part  # NCCL knows no FP8 here
            got = sent.new_empty(sum(self._rows_in), sent.shape[1])
            self._all_to_all(got, sent, self._rows_in, self._rows_out)

    def _home(self) -> None:
        home_MH = self._y_NH.new_empty(sum(self._rows_out), self._case.hidden)
        self._all_to_all(home_MH, self._y_NH, self._rows_out, self._rows_in)
        sum_rows(home_MH, self._order_M, self._offsets_T, torch.bfloat16)

    def _all_gather(self) -> None:
        self._group._allgather_base(torch.empty_like(self._all_RTH), self._x_TH).wait()

    def _reduce_scatter(self) -> None:
        self._group._reduce_scatter_base(torch.empty_like(self._x_TH), self._all_RTH).wait()

    def _all_to_all(
        self, out: Tensor, inp: Tensor, rows_in: list[int], rows_out: list[int]
    ) -> None:
        options = dist.AllToAllOptions()
        self._group.alltoall_base(out, inp, rows_in, rows_out, options).wait()


def link_copy(world: World) -> Work:
    """COPY_BYTES to the next rank's symmetric memory, by all ranks at once. Collective."""
    buffer = symmetric_buffer(world, COPY_BYTES)
    handle, _ = buffer.owner
    peer = handle.get_buffer((world.rank + 1) % world.size, (COPY_BYTES,), torch.uint8)
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=world.device)

    def copy(i: int, kept: object = buffer) -> None:  # `peer` alone does not keep its memory
        peer.copy_(source)

    return Work(copy)
