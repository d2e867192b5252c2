"""One move to another placement as the gateway sees it: begun, heard of from each rank, ended."""

from dataclasses import replace

import numpy as np

from crossdock.core import Busy, Placement
from crossdock.core.messages import Rebalance, Rebalanced


class Moves:
    """To be used under a lock. `placement`: what all ranks serve now."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self._epoch = 0
        self._target: np.ndarray | None = None
        self._ended: dict[int, Rebalanced] = {}

    @property
    def under_way(self) -> bool:
        return self._target is not None

    def begin(self, slot_expert_LP: np.ndarray, wave: int) -> Rebalance:
        """What to tell the ranks. Raises Busy where they have not all ended the move before."""
        if self.under_way:
            raise Busy("experts are being moved already; ask again when that has ended")
        self._epoch += 1
        self._target, self._ended = slot_expert_LP, {}
        rows = tuple(tuple(int(e) for e in row) for row in slot_expert_LP)
        return Rebalance(self._epoch, rows, wave)

    def ended(self, message: Rebalanced) -> None:
        self._ended[message.rank] = message
        if self._target is None or len(self._ended) < self.placement.num_ranks:
            return
        # After a failure too the layers that had moved are served from their new slots.
        done, slots_LP = self.result().layers, self.placement.slot_expert_LP
        if slots_LP.shape == self._target.shape:
            layers = np.flatnonzero((slots_LP != self._target).any(axis=1))[:done]
            slots_LP = slots_LP.copy()
            slots_LP[layers] = self._target[layers]
            self.placement = replace(self.placement, epoch=self._epoch, slot_expert_LP=slots_LP)
        self._target = None

    def result(self) -> Rebalanced:
        """Of the last move: what of it ended least well on any rank; bytes of all ranks."""
        results = self._ended.values()
        worst = min(results, key=lambda r: (r.error is None, r.layers))
        moved_bytes = sum(r.moved_bytes for r in results)
        return replace(worst, moved_bytes=moved_bytes, seconds=max(r.seconds for r in results))

    def missing(self) -> list[int]:
        """Ranks that have not ended the move."""
        return sorted(set(range(self.placement.num_ranks)) - set(self._ended))
