"""One configuration of `bench comm` over NVLink: its sizes, and inputs that every rank draws."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdock.core import Routing

PATTERNS = ("uniform", "one-rank")
OURS = "nvlink"
OTHER_FORMS = ("nvlink, in two launches", "nvlink, in one launch")
"""Sending and receiving apart or together, by whether together; OURS is what the transport does."""
LINK = "copy over the link"
KNOWN, ASKED = "all-to-all, sizes known", "all-to-all, counts exchanged"
GATHER, SCATTER = "all-gather", "reduce-scatter"
"""Who moves the rows; the last four with their library's name before."""
COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class CommCase:
    """`max_tokens`: what buffers are sized for; up to 256 chooses low latency. `pattern`: uniform,
    or one-rank, all tokens to experts of rank 0."""

    ranks: int
    tokens: int
    max_tokens: int
    hidden: int
    experts: int
    top_k: int
    fp8: bool = False
    per_expert: bool = False
    pattern: str = "uniform"

    @property
    def slots(self) -> int:
        """Of a rank; an expert has one."""
        return -(-self.experts // self.ranks)

    def slots_of(self, rank: int, seed: int) -> np.ndarray:
        """int64 [T, K] of any rank, the same on every rank; those of a token differ."""
        rng = np.random.default_rng((seed, rank))
        usable = self.experts if self.pattern == "uniform" else self.slots
        return np.ascontiguousarray(rng.random((self.tokens, usable)).argsort(1)[:, : self.top_k])

    def busiest_link(self, seed: int, per_expert: bool) -> int:
        """Rows on the busiest direction of any rank's link: of tokens, once per rank, or per
        expert."""
        rows = np.zeros((self.ranks, self.ranks), np.int64)
        for source in range(self.ranks):
            target_TK = self.slots_of(source, seed) // self.slots
            for rank in range(self.ranks):
                here_TK = target_TK == rank
                rows[source, rank] = (here_TK if per_expert else here_TK.any(1)).sum()
        np.fill_diagonal(rows, 0)
        return int(max(rows.sum(0).max(), rows.sum(1).max()))


@dataclass(frozen=True, eq=False)
class Inputs:
    x_TH: Tensor
    routing: Routing


def draw(case: CommCase, rank: int, seed: int, device: torch.device) -> Inputs:
    """Normal BF16 rows, weights in [0, 1)."""
    slots_TK = torch.from_numpy(case.slots_of(rank, seed)).to(device)
    x_TH = torch.randn(case.tokens, case.hidden, device=device).bfloat16()
    return Inputs(x_TH, Routing(slots_TK, torch.rand(slots_TK.shape, device=device)))
