"""One exchange of rows between the ranks: tensors in, device tensors out, no word from the host.

Buffer sets are independent of each other: each has its epochs, flags and rows. Within a set
dispatch and combine alternate, and then no acknowledgement is needed: a rank begins to overwrite a
peer's staging only after it has ended the combine before, for which that peer raised its flags
after it had read the staging; and cells at home likewise. Exchanges that only dispatch (or only
combine) are safe when they use the sets in turn. Everything combine needs of a dispatch is copied
out of the staging, since a peer without tokens may be a step ahead.

What is *fused* sends and receives in one launch. All ranks must then launch their exchanges in the
same order on one stream, or two ranks could wait for each other.
"""

import torch
from torch import Tensor

from crossdock.comm.nvlink import combining, dispatching
from crossdock.comm.nvlink.handles import Arrived, Masked, Segments
from crossdock.comm.nvlink.layout import NvlinkLayout
from crossdock.comm.nvlink.state import ExchangeState
from crossdock.comm.symmetric import SymmetricBuffer

__all__ = ["Arrived", "Masked", "NvlinkExchange", "Segments"]


class NvlinkExchange:
    """`programs`: how many a kernel may have, each half of one that sends and receives; None: as
    measured best.

    All methods that send raise:
        CapacityError: more tokens than the buffers hold, too little room for masked rows.
        CrossdockError: a tensor is not what the buffers were made for; an earlier step had a slot
            that no rank has.
        RankLost: an earlier wait gave up.
    """

    def __init__(
        self,
        rank: int,
        layout: NvlinkLayout,
        buffer: SymmetricBuffer,
        slots_per_rank: int,
        dtype: torch.dtype,
        deadline_s: float,
        programs: int | None = None,
    ):
        self.rank, self.layout, self.slots, self.dtype = rank, layout, slots_per_rank, dtype
        self.device, self._buffer = buffer.local.device, buffer
        self._state = ExchangeState(
            rank, layout, buffer, slots_per_rank, dtype, deadline_s, programs
        )

    @property
    def programs(self) -> int:
        """Most that a kernel has, each half of one that sends and receives."""
        return self._state.programs

    @programs.setter
    def programs(self, most: int) -> None:
        self._state.programs = most

    def dispatch_send(self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        """Pushes rows of set `at` to all who need them. slots int64, -1: none; weights fp32."""
        dispatching.send(self._state, at, (x_TH, slots_TK, weights_TK))

    def dispatch_rows(self, at: int) -> Arrived:
        """Waits for the rows of set `at` where they lie."""
        return dispatching.rows(self._state, at)

    def dispatch_rows_fused(
        self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor
    ) -> Arrived:
        """`dispatch_send` and `dispatch_rows` in one launch."""
        return dispatching.rows(self._state, at, (x_TH, slots_TK, weights_TK))

    def place(self, at: int, arrived: Arrived, alignment: int) -> Segments:
        """Where each slot's rows are, for a grouped product; in either mode, once a dispatch."""
        return dispatching.place(self._state, at, arrived, alignment)

    def dispatch_masked(self, at: int, x: Tensor, scales: Tensor | None) -> Masked:
        """Waits for the rows of set `at` and copies each to all its slots.

        Args:
            x: [S, C, H] of what travels; C at least R * max_tokens. scales: [S, C, H / 128].
        """
        return dispatching.masked(self._state, at, x, scales)

    def dispatch_masked_fused(
        self,
        at: int,
        x_TH: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        x: Tensor,
        scales: Tensor | None,
    ) -> Masked:
        """`dispatch_send` and `dispatch_masked` in one launch."""
        return dispatching.masked(self._state, at, x, scales, (x_TH, slots_TK, weights_TK))

    def combine_rows(self, at: int, y: Tensor, arrived: Arrived) -> None:
        """Sends home y [N, H], reduced, or per expert [N, K, H], unweighted. `combine_home` wants
        the same y, unchanged."""
        combining.send(self._state, at, combining.of_rows(self._state, y, arrived))

    def combine_segments(self, at: int, y: Tensor, arrived: Arrived, segments: Segments) -> None:
        """Sends home rows y [places, H] in the order of `segments`; weighs them unless per
        expert."""
        combining.send(self._state, at, combining.of_segments(self._state, y, arrived, segments))

    def combine_masked(self, at: int, y: Tensor, masked: Masked) -> None:
        """Sends home y [S, C, H] that lies like `masked`."""
        combining.send(self._state, at, combining.of_masked(self._state, y, masked))

    def combine_home(
        self, at: int, slots_TK: Tensor, weights_TK: Tensor, y: Tensor | None = None
    ) -> Tensor:
        """[T, H]: what came home, summed. y: as given to `combine_rows`, after that alone."""
        return combining.home(self._state, at, slots_TK, weights_TK, y)

    def combine_rows_fused(
        self, at: int, y: Tensor, arrived: Arrived, slots_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """`combine_rows` and `combine_home` in one launch."""
        sending = combining.of_rows(self._state, y, arrived)
        return combining.fused(self._state, at, sending, slots_TK, weights_TK)

    def combine_segments_fused(
        self,
        at: int,
        y: Tensor,
        arrived: Arrived,
        segments: Segments,
        slots_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """`combine_segments` and `combine_home` in one launch."""
        sending = combining.of_segments(self._state, y, arrived, segments)
        return combining.fused(self._state, at, sending, slots_TK, weights_TK)

    def combine_masked_fused(
        self, at: int, y: Tensor, masked: Masked, slots_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """`combine_masked` and `combine_home` in one launch."""
        sending = combining.of_masked(self._state, y, masked)
        return combining.fused(self._state, at, sending, slots_TK, weights_TK)

    @property
    def giving_up(self) -> tuple[Tensor, Tensor, int]:
        """The word of errors, its mirror on the host, and the limit of a wait; for kernels that
        wait beside these, whose errors `check` then tells too."""
        return self._state.giving_up

    def expect(self, name: str, got: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises: CrossdockError: `got` is something else."""
        self._state.expect(name, got, shape, dtype)

    def rows_sent(self) -> list[list[int]]:
        """Totals `[dispatch, combine]` by rank; asks the device."""
        return self._state.sent.tolist()

    def check(self) -> None:
        """
        Raises:
            RankLost: a wait gave up; nothing that came since can be used.
            CrossdockError, CapacityError: slots that cannot be served.
        """
        self._state.check()
