"""Replica choice by quota: each step's tokens spread over the copies of their experts so that ranks
are loaded evenly, from the counts of all ranks' tokens.

This is the host's form of `kernels.reroute`, to the token; for algorithms and sources see
`balance.reroute`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from crossdock.balance.reroute import SWEEPS
from crossdock.core import Placement

if TYPE_CHECKING:
    from crossdock.kernels.reroute import Copies


class QuotaMap:
    """Of one layer. Of several copies of an expert on one rank the first serves all its tokens.

    `on_device`: by kernels, whose maps stay at fixed addresses and which ask nothing of the host.
    """

    def __init__(
        self,
        placement: Placement,
        index: int,
        rank: int,
        device: torch.device,
        on_device: bool = False,
    ):
        self._index, self._rank = index, rank
        self._slot_ER = np.empty((placement.num_experts, placement.num_ranks), np.int64)
        self._hosts: list[tuple[int, list[int]]] = []
        self.copies: Copies | None = None
        if on_device:
            self.copies = _empty_copies(*self._slot_ER.shape, device)
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Between steps; `placement` has the same shape as the one before."""
        row_P, S = placement.slot_expert_LP[self._index], placement.slots_per_rank
        self._slot_ER.fill(-1)
        there = np.flatnonzero(row_P >= 0)[::-1]  # the first of a rank's copies is written last
        self._slot_ER[row_P[there], there // S] = there
        host_ER = self._slot_ER >= 0
        spread = np.flatnonzero(host_ER.sum(axis=1) > 1)
        self._hosts = [(int(e), np.flatnonzero(host_ER[e]).tolist()) for e in spread]
        self._first_E = self._slot_ER.max(axis=1)
        if self.copies is not None:
            self.copies.load(self._slot_ER)

    def __call__(self, ids_TK: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """`slots_TK`; -1 where `ids_TK` is.

        Args:
            gather: from how many of this rank's tokens chose each expert, [E], to [R, E], those of
                each rank; int64, on the device int32.
        """
        if self.copies is not None:
            from crossdock.kernels.reroute import count, fill_quotas, reroute

            ids_TK = ids_TK.contiguous()
            counted = count(ids_TK, len(self._slot_ER))
            tokens_RE = gather(counted.tokens_E)
            quota_ER = fill_quotas(tokens_RE, self.copies)
            return reroute(ids_TK, counted, tokens_RE, quota_ER, self.copies, self._rank)
        tokens_RE = gather(_counts_of(ids_TK, len(self._slot_ER)))
        ids = ids_TK.reshape(-1).numpy()
        slots = np.where(ids < 0, -1, self._first_E[ids])
        tokens = tokens_RE.numpy()
        order = ids.argsort(kind="stable")
        starts = ids[order].searchsorted([e for e, _ in self._hosts]).tolist()
        for (e, hosts), quotas, start in zip(
            self._hosts, self._quotas(tokens), starts, strict=True
        ):
            mine = int(tokens[self._rank, e])
            if mine:
                sent = _sent(tokens[hosts, e].tolist(), quotas, hosts, self._rank, mine)
                slots[order[start : start + mine]] = self._slot_ER[e, hosts].repeat(sent)
        return torch.from_numpy(slots).view_as(ids_TK)

    def _quotas(self, tokens_RE: np.ndarray) -> list[list[int]]:
        """Of each expert with several hosts, what each of them serves."""
        total_E = tokens_RE.sum(axis=0)
        load = np.zeros(tokens_RE.shape[0], np.int64)
        alone = (self._slot_ER >= 0).sum(axis=1) == 1
        np.add.at(load, self._slot_ER.argmax(axis=1)[alone], total_E[alone])
        load_R, totals, quotas = load.tolist(), total_E.tolist(), []
        for e, hosts in self._hosts:
            each, rest = divmod(totals[e], len(hosts))
            quotas.append([each + (i < rest) for i in range(len(hosts))])
            for rank, quota in zip(hosts, quotas[-1], strict=True):
                load_R[rank] += quota
        for _ in range(SWEEPS):
            for i, (e, hosts) in enumerate(self._hosts):
                if totals[e]:
                    quotas[i] = _fill(totals[e], load_R, hosts, quotas[i])
        return quotas


def _counts_of(ids_TK: Tensor, experts: int) -> Tensor:
    ids = ids_TK.reshape(-1)
    ids = ids.masked_fill(ids < 0, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:experts]


def _fill(tokens: int, load_R: list[int], hosts: list[int], old: list[int]) -> list[int]:
    """Takes `old` out of the hosts' loads and raises the lowest of them to one level."""
    for rank, quota in zip(hosts, old, strict=True):
        load_R[rank] -= quota
    below = hosts
    while True:
        total = tokens + sum([load_R[rank] for rank in below])
        level = total // len(below)
        still = [rank for rank in below if load_R[rank] <= level]
        if len(still) == len(below):
            break
        below = still
    raised = dict.fromkeys(below, level)
    for rank in below[: total - level * len(below)]:
        raised[rank] += 1
    new = [raised[rank] - load_R[rank] if rank in raised else 0 for rank in hosts]
    for rank, level in raised.items():
        load_R[rank] = level
    return new


def _sent(
    tokens: Sequence[int], quotas: Sequence[int], hosts: Sequence[int], rank: int, mine: int
) -> list[int]:
    """How many of `mine`, this rank's tokens of an expert, go to each host; `tokens`: of hosts."""
    own = [min(t, q) for t, q in zip(tokens, quotas, strict=True)]
    free = [q - o for q, o in zip(quotas, own, strict=True)]
    sent = [o if host == rank else 0 for host, o in zip(hosts, own, strict=True)]
    left, whole = mine - sum(sent), max(1, sum(free))
    parts = [divmod(f * left, whole) for f in free]
    missing = left - sum(part for part, _ in parts)
    largest = sorted(range(len(hosts)), key=lambda i: -parts[i][1])[:missing]
    return [
        s + part + (i in largest) for i, (s, (part, _)) in enumerate(zip(sent, parts, strict=True))
    ]


def _empty_copies(experts: int, ranks: int, device: torch.device) -> "Copies":
    from crossdock.kernels.reroute import Copies  # imports triton

    return Copies.empty(experts, ranks, device)
