"""One move to another placement as the gateway sees it: begun, heard of from each rank, ended."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from crossdock.core import Busy, ConfigError, Placement
from crossdock.core.messages import Rebalance, Rebalanced


class Moves:
    """To be used under a lock. `placement`: what all ranks serve now."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self._epoch = 0
        self._target = placement.slot_expert_LP
        self._ended: dict[int, Rebalanced] = {}
        self._result: Future[Rebalanced] | None = None

    @property
    def under_way(self) -> bool:
        return self._result is not None

    def begin(self, slot_expert_LP: np.ndarray, wave: int) -> tuple[Rebalance, Future[Rebalanced]]:
        """What to tell the ranks; and, done once all have ended this move, what of it ended least
        well on any rank, with the bytes of all ranks.

        Raises:
            Busy: they have not all ended the move before.
            ConfigError: it is no placement of these layers and slots.
        """
        if self.under_way:
            raise Busy("experts are being moved already; ask again when that has ended")
        target, now = np.array(slot_expert_LP), self.placement.slot_expert_LP
        if target.shape != now.shape or target.dtype.kind not in "iu":
            raise ConfigError(
                f"a placement of shape {target.shape} and {target.dtype}; expected (layers, slots) "
                f"= {now.shape}, integers"
            )
        self._epoch += 1
        self._target, self._ended, self._result = target, {}, Future()
        rows = tuple(tuple(row) for row in target.tolist())
        return Rebalance(self._epoch, rows, wave), self._result

    def ended(self, message: Rebalanced) -> None:
        self._ended[message.rank] = message
        if self._result is None or len(self._ended) < self.placement.num_ranks:
            return
        results = self._ended.values()
        worst = min(results, key=lambda r: (r.error is None, r.layers))
        # After a failure too the layers that had moved are served from their new slots.
        slots_LP = self.placement.slot_expert_LP.copy()
        layers = np.flatnonzero((slots_LP != self._target).any(axis=1))[: worst.layers]
        slots_LP[layers] = self._target[layers]
        self.placement = replace(self.placement, epoch=self._epoch, slot_expert_LP=slots_LP)
        moved_bytes, seconds = sum(r.moved_bytes for r in results), max(r.seconds for r in results)
        self._result.set_result(replace(worst, moved_bytes=moved_bytes, seconds=seconds))
        self._result = None

    def missing(self) -> list[int]:
        """Ranks that have not ended the move."""
        return sorted(set(range(self.placement.num_ranks)) - set(self._ended))
