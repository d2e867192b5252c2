"""The ranks of one attention group do the same: each has a scheduler of its own, and all of them
are told the same at the same step. So they make the same plans, and no plan travels.

The gateway sends a group's requests and their ends to all its ranks, in the same order but not at
the same time. In the lockstep each says how many it has heard of; what all have, all pass on to
their schedulers before the next plan. The tokens sampled are those of the group's first rank, so
that no difference of rounding can part them.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossdock.comm import World, await_start, tensor_bytes
from crossdock.core import (
    CrossdockError,
    EngineConfig,
    Group,
    ModelSpec,
    Plan,
    Request,
    Scheduled,
)
from crossdock.engine.sampler import Draw, Sampler, told
from crossdock.scheduler import Scheduler


class Inbox:
    """What the gateway says to a group, for this rank's scheduler. In a group of one rank it is
    passed on at once.

    `first`, `size`: the ranks of the group. In each step its `words` go through the lockstep and
    `advance` gets everybody's, at the same place among the scheduler's calls on all ranks.
    """

    def __init__(self, scheduler: Scheduler, first: int, size: int):
        self._scheduler, self._ranks = scheduler, range(first, first + size)
        self._held = deque[Callable[[], object]]()
        self._heard = 0

    @property
    def waits(self) -> bool:
        """Whether there is something that not all ranks of the group were known to have."""
        return bool(self._held)

    def add(self, request: Request) -> None:
        self._tell(lambda: self._scheduler.add(request))

    def abort(self, request_id: str) -> None:
        self._tell(lambda: self._scheduler.abort(request_id))

    def _tell(self, news: Callable[[], object]) -> None:
        if len(self._ranks) == 1:
            news()
        else:
            self._heard += 1
            self._held.append(news)

    def words(self, plan: Plan) -> tuple[int, ...]:
        """For the lockstep; none in a group of one rank."""
        return () if len(self._ranks) == 1 else (self._heard, _digest(plan))

    def advance(self, table: Sequence[tuple[int, ...]]) -> None:
        """`table[r]`: the words of rank r.

        Raises:
            CrossdockError: the ranks of the group did not plan the same.
        """
        if len(self._ranks) == 1:
            return
        mine = [table[rank] for rank in self._ranks]
        if len({digest for _, digest in mine}) > 1:
            raise CrossdockError(
                f"ranks {self._ranks.start} to {self._ranks.stop - 1} share an attention group and "
                "planned different steps; this is a bug"
            )
        known_to_all = min(heard for heard, _ in mine)
        for _ in range(known_to_all - (self._heard - len(self._held))):
            self._held.popleft()()


def _digest(plan: Plan) -> int:
    """Of what decides the shapes of a step and the places it writes to."""
    return hash(tuple([(i.start, len(i.tokens), i.pages[-1], i.sample) for i in plan.items]))


class GroupSampler(Sampler):
    """Of a group of several ranks: what its first rank samples is what all have. On the others only
    the tokens are known, not their probabilities; they report nothing."""

    def __init__(self, vocab_size: int, device: torch.device, group: Group):
        super().__init__(vocab_size, device)
        self._group = group

    def draw(
        self, logits_BV: Tensor, items: Sequence[Scheduled], mask: Tensor | None = None
    ) -> Draw:
        if self._group.rank == 0 or not items:
            draw = super().draw(logits_BV, items, mask)
            if items:
                self._group.broadcast(draw.told_B)
            return draw
        told_B = torch.empty(len(items), dtype=torch.int64, device=self.device)
        return told(self._group.broadcast(told_B))


def exchanged_bytes(config: EngineConfig, spec: ModelSpec, dtype_bytes: int) -> int:
    """Of the largest tensor that a group exchanges in a step. `dtype_bytes`: of activations."""
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    return tensor_bytes(tokens, spec.hidden_size, dtype_bytes)


def agreed_pages(world: World, pages: int) -> int:
    """Of the KV cache, as many on all ranks of a group: those of the rank that has fewest.
    Collective; ranks that are still loading are waited for."""
    if world.tp == 1:
        return pages
    world.board.enter("agree", step=0)
    await_start(world)
    first = world.rank - world.rank % world.tp
    return min(row[0] for row in world.lockstep.exchange((pages,))[first : first + world.tp])
