"""The control board: where each rank was last seen, so that an error can say who did not come."""

import time
from typing import Final

from crossdock.comm.shared import BOARD_WORDS, SharedMemory

STAGES: Final = (
    "start", "idle", "agree", "attention", "dispatch", "experts", "combine", "sample", "counts",
    "forward",
)  # fmt: skip
STALE_S = 1.5
"""A heartbeat older than this means stopped or gone, not slow."""
_CODES = {stage: code for code, stage in enumerate(STAGES)}
_BEAT, _STEP, _STAGE = range(3)


class Board:
    """One line per rank: heartbeat (monotonic ns), step, stage and MoE layer.

    In `memory` all ranks of a host see all lines; without it a rank has only its own.
    """

    def __init__(self, rank: int, size: int, memory: SharedMemory | None = None):
        self.rank, self.size, self.shared = rank, size, memory is not None
        words = size * BOARD_WORDS
        self._words = (
            memory.words(0, words) if memory else memoryview(bytearray(words * 8)).cast("q")
        )
        self._line = rank * BOARD_WORDS

    def enter(self, stage: str, layer: int = -1, step: int | None = None) -> None:
        """Says where this rank is. Costs well under a microsecond."""
        self._words[self._line + _STAGE] = (_CODES[stage] << 32) | (layer + 1)
        if step is not None:
            self._words[self._line + _STEP] = step

    def beat(self) -> None:
        """Called by a thread of the rank about once a second."""
        self._words[self._line + _BEAT] = time.monotonic_ns()

    def where(self, rank: int) -> tuple[str, int, int]:
        """`(stage, layer, step)` last written by `rank`; layer -1 where none applies."""
        line = rank * BOARD_WORDS
        packed = self._words[line + _STAGE]
        return STAGES[packed >> 32], (packed & 0xFFFFFFFF) - 1, self._words[line + _STEP]

    def heartbeat_age(self, rank: int) -> float:
        """Seconds; infinite before the first beat."""
        beat = self._words[rank * BOARD_WORDS + _BEAT]
        return (time.monotonic_ns() - beat) / 1e9 if beat else float("inf")

    def describe(self, rank: int) -> str:
        if not self.shared and rank != self.rank:
            return f"rank {rank} (on a host whose board is not shared)"
        stage, layer, step = self.where(rank)
        age = self.heartbeat_age(rank)
        at = f" of MoE layer {layer}" if layer >= 0 else ""
        if age == float("inf"):
            alive = "no heartbeat yet"
        else:
            alive = f"last heartbeat {age:.1f} s ago" + (
                ": stopped or gone" if age > STALE_S else ": running, but slow"
            )
        return f"rank {rank}, last seen in {stage}{at}, step {step}; {alive}"
