"""Adjusting the routers' bias while serving, so that loads even out. It changes answers.

Source: auxiliary-loss-free balancing (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section
2.1.2): after each window an expert with less than the mean load gets a step more, one with more a
step less. The bias decides the choice of experts alone, never their weights.
"""

from collections.abc import Sequence

import numpy as np
import torch

from crossdock.comm.shared import LOCKSTEP_VALUES
from crossdock.core import Lockstep, SlotLayer
from crossdock.metrics import Recorder

_HALF = 32
"""Bits of a count where two travel in one integer."""


class BiasAdjuster:
    """All ranks adjust at the same step, from the same counts, so they keep the same bias.

    `window`: tokens of all ranks after which the bias is adjusted. `most`: how far it may get from
    the checkpoint's (of routers without one: from 0).
    """

    def __init__(
        self,
        lockstep: Lockstep,
        layers: Sequence[SlotLayer],
        step: float,
        most: float,
        window: int,
        recorder: Recorder,
    ):
        self._lockstep, self._step, self._most, self._window = lockstep, step, most, window
        self._tokens_LE, self._bias_LE = zip(
            *(layer.router_bias() for layer in layers), strict=True
        )
        self._start_LE = [bias_E.clone() for bias_E in self._bias_LE]
        self._added_LE = np.zeros(self._read().shape, np.float32)
        self._seen_LE: np.ndarray | None = None
        self._in_window = self.updates = 0
        recorder.source("router_bias", self._describe)

    def advance(self, tokens: int) -> None:
        """Before a step of `tokens`, of all ranks together; without any, nothing is adjusted.

        Raises:
            RankLost: a rank did not come within the deadline.
        """
        if not tokens:
            return
        if self._seen_LE is None:
            self._seen_LE = self._read()
        if self._in_window >= self._window:
            now_LE = self._read()
            self._adjust(self._summed(now_LE - self._seen_LE))
            self._seen_LE, self._in_window = now_LE, 0
        self._in_window += tokens

    def _read(self) -> np.ndarray:
        return torch.stack(self._tokens_LE).cpu().numpy().copy()

    def _summed(self, tokens_LE: np.ndarray) -> np.ndarray:
        """Over the ranks, by as many exchanges as it takes."""
        halves = np.minimum(tokens_LE, (1 << _HALF - 1) - 1).ravel()
        halves = np.pad(halves, (0, len(halves) % 2))
        words = (halves[0::2] << _HALF | halves[1::2]).tolist()
        total = np.zeros(len(words), np.int64)
        for start in range(0, len(words), LOCKSTEP_VALUES):
            part = slice(start, start + LOCKSTEP_VALUES)
            total[part] = np.sum(self._lockstep.exchange(words[part]), axis=0)
        both = np.stack((total >> _HALF, total & (1 << _HALF) - 1), axis=1)
        return both.ravel()[: tokens_LE.size].reshape(tokens_LE.shape)

    def _adjust(self, load_LE: np.ndarray) -> None:
        under_LE = np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
        added_LE = self._added_LE + np.float32(self._step) * under_LE.astype(np.float32)
        self._added_LE = added_LE.clip(-self._most, self._most)
        for bias_E, start_E, added_E in zip(
            self._bias_LE, self._start_LE, self._added_LE, strict=True
        ):
            bias_E.copy_(start_E + torch.from_numpy(added_E).to(start_E.device))
        self.updates += 1

    def _describe(self) -> dict[str, float]:
        largest = float(np.abs(self._added_LE).max())
        return {"router_bias_updates": self.updates, "router_bias_largest": largest}
