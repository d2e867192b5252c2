"""Launching the kernels of one exchange: tensors in, device tensors out, no word from the host.

Buffer sets are independent of each other: each has its epochs, flags and rows. Within a set
dispatch and combine alternate, and then no acknowledgement is needed: a rank begins to overwrite a
peer's staging only after it has ended the combine before, for which that peer raised its flags
after it had read the staging; and cells at home likewise. Exchanges that only dispatch (or only
combine) are safe when they use the sets in turn. Everything combine needs of a dispatch is copied
out of the staging, since a peer without tokens may be a step ahead.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.layout import SETS, NvlinkLayout
from crossdock.comm.symmetric import SymmetricBuffer
from crossdock.core import CapacityError, RankLost
from crossdock.kernels.combine import (
    INDEXED,
    PER_EXPERT,
    PER_EXPERT_INDEXED,
    REDUCED,
    combine_home,
    combine_send,
)
from crossdock.kernels.dispatch import MAX_K, dispatch_masked, dispatch_rows, dispatch_send
from crossdock.kernels.segments import place_rows
from crossdock.kernels.signals import STAGES

_DISPATCH, _COMBINE = range(2)
_ROUNDS_PER_S = 5000
"""Of a wait in the interpreter, about."""
_WARPS = 8
_UNROLL, _REGISTERS = 2, 128
"""Of the sending half of combine. With four rows at a time only one program fits a multiprocessor:
309 us instead of 230 for 4,096 tokens on two H200."""
_CPU_PROGRAMS = 3


@dataclass(frozen=True, eq=False)
class Arrived:
    """rows [N, H] and scales [N, H / 128] (None unless FP8) in the staging; slots_NK int64, -1
    where nothing is here; weights_NK fp32. tokens_R: int32, how many each source sent; counts_S:
    int32, rows of each slot. Rows are valid until the combine of this exchange."""

    rows: Tensor
    scales: Tensor | None
    slots_NK: Tensor
    weights_NK: Tensor
    tokens_R: Tensor
    counts_S: Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """offsets int32 [S + 1], aligned; rows int32: row of each place, -1 for alignment (beyond
    offsets[S]: anything); places_NK int32, -1 for none."""

    offsets: Tensor
    rows: Tensor
    places_NK: Tensor


@dataclass(frozen=True, eq=False)
class Masked:
    """x [S, C, H], scales [S, C, H / 128] or None, counts_S int32. places int32 and weights fp32
    [N, 16]: slot * C + place of each copy, -1 for none."""

    x: Tensor
    scales: Tensor | None
    counts_S: Tensor
    tokens_R: Tensor
    places: Tensor
    weights: Tensor


class NvlinkExchange:
    """`programs`: how many a kernel may have; None: four per multiprocessor."""

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
        if dtype.itemsize != layout.itemsize or buffer.nbytes < layout.nbytes:
            raise CapacityError(
                f"the layout asks for {layout.nbytes} bytes and elements of {layout.itemsize}, "
                f"got {buffer.nbytes} and {dtype}"
            )
        self.rank, self.layout, self.slots, self.dtype = rank, layout, slots_per_rank, dtype
        self._buffer, self.device = buffer, buffer.local.device
        self.interpret = bool(triton.knobs.runtime.interpret)
        on_cuda = self.device.type == "cuda"
        if programs is None and on_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            programs = 4 * properties.multi_processor_count
        self._programs = programs or _CPU_PROGRAMS
        self._limit = int(deadline_s * (_ROUNDS_PER_S if self.interpret else 1e9))
        self._ranks_bound = max(8, triton.next_power_of_2(layout.ranks))
        self._top = triton.next_power_of_2(layout.top_k)
        self._groups = triton.next_power_of_2(layout.hidden // 128)
        R, N = layout.ranks, layout.cells
        self._epochs = self._new((SETS, 2, 2), torch.int64)
        self._sent = self._new((2, R), torch.int64)
        self._error = self._new((1,), torch.int64)
        # Pinned: kernels write it, the host reads it without asking the device.
        mirror = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._mirror, self._seen = mirror, mirror.numpy()
        self._counters = self._new((SETS, 2, slots_per_rank), torch.int32)
        self._tokens = self._new((SETS, R), torch.int32)
        self._places = self._new((SETS, N, MAX_K), torch.int32)
        self._weights = self._new((SETS, N, MAX_K), torch.float32)

    def dispatch_send(self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        """Pushes rows of set `at` to all who need them.

        Raises:
            CapacityError: more tokens than the buffers hold.
            RankLost: an earlier wait gave up.
        """
        self.check()
        layout, tokens = self.layout, x_TH.shape[0]
        if tokens > layout.max_tokens:
            raise CapacityError(
                f"{tokens} tokens in a step, the buffers hold {layout.max_tokens} per rank "
                "(max_num_batched_tokens)"
            )
        start = at * layout.set_bytes
        counters = self._counters[at]
        dispatch_send[(self._grid(-(-tokens // layout.chunk)),)](
            x_TH, slots_TK, weights_TK, self._buffer.table, self._epochs[at, _DISPATCH],
            self._sent[_DISPATCH], counters, counters.numel(),
            tokens, layout.hidden, slots_TK.shape[1], self.slots, layout.ranks, self.rank,
            layout.max_tokens, layout.units,
            start + layout.counts(_DISPATCH), start + layout.flags(_DISPATCH),
            start + layout.records, start + layout.rows, start + layout.scales,
            CHUNK=layout.chunk, GROUPS=self._groups, FP8=layout.fp8, R_MAX=self._ranks_bound,
            INTERPRET=self.interpret, num_warps=_WARPS,
        )  # fmt: skip

    def dispatch_rows(self, at: int) -> Arrived:
        """Waits for the rows of set `at` where they lie."""
        layout, (R, N, K) = self.layout, (self.layout.ranks, self.layout.cells, self.layout.top_k)
        slots_NK = torch.empty(N, K, dtype=torch.int64, device=self.device)
        weights_NK = torch.empty(N, K, dtype=torch.float32, device=self.device)
        rows, scales = self._staged(at)
        counts_S = self._counters[at, 0]
        dispatch_rows[(self._grid(R * layout.units),)](
            *self._words(at, _DISPATCH), self._records(at), self._epochs[at, _DISPATCH],
            slots_NK, weights_NK, self._tokens[at], counts_S, K, R, layout.max_tokens,
            layout.units, *self._giving_up,
            CHUNK=layout.chunk, INTERPRET=self.interpret, num_warps=1 if layout.low_latency else 4,
        )  # fmt: skip
        return Arrived(rows, scales, slots_NK, weights_NK, self._tokens[at], counts_S)

    def place(self, at: int, arrived: Arrived, alignment: int) -> Segments:
        """Where each slot's rows are, for a grouped product."""
        entries = arrived.slots_NK.numel()
        capacity = entries + self.slots * (alignment - 1)
        sizes = ((self.slots + 1,), (capacity,), tuple(arrived.slots_NK.shape))
        offsets, rows, places_NK = (
            torch.empty(size, dtype=torch.int32, device=self.device) for size in sizes
        )
        block = 512
        place_rows[(self._grid(-(-entries // block)),)](
            arrived.slots_NK, arrived.counts_S, self._counters[at, 1], offsets, rows, places_NK,
            entries, arrived.slots_NK.shape[1], self.slots, capacity, alignment,
            S_MAX=max(2, triton.next_power_of_2(self.slots)), BLOCK=block, num_warps=4,
        )  # fmt: skip
        return Segments(offsets, rows, places_NK)

    def dispatch_masked(self, at: int, x: Tensor, scales: Tensor | None) -> Masked:
        """Waits for the rows of set `at` and copies each to all its slots.

        Args:
            x: [S, C, H] of what travels; C at least R * max_tokens. scales: [S, C, H / 128].
        """
        layout = self.layout
        if not layout.low_latency or x.shape[1] < layout.cells:
            raise CapacityError(
                f"masked rows need at most 256 tokens per rank and {layout.cells} places per slot, "
                f"got {layout.max_tokens} and {x.shape[1]}"
            )
        rows, staged = self._staged(at)
        counts_S = self._counters[at, 0]
        spare = self._error if scales is None else scales
        dispatch_masked[(layout.cells,)](
            *self._words(at, _DISPATCH), self._records(at), rows,
            self._error if staged is None else staged, self._epochs[at, _DISPATCH],
            self._places[at], self._weights[at], self._tokens[at], counts_S, x, spare,
            layout.hidden, layout.ranks, layout.max_tokens, layout.units, x.shape[1],
            *self._giving_up,
            GROUPS=self._groups, FP8=layout.fp8, TOP=self._top, INTERPRET=self.interpret,
            num_warps=4,
        )  # fmt: skip
        return Masked(x, scales, counts_S, self._tokens[at], self._places[at], self._weights[at])

    def combine_rows(self, at: int, y: Tensor, arrived: Arrived) -> None:
        """Sends home y [N, H], reduced, or per expert [N, K, H], unweighted. `combine_home` wants
        the same y, unchanged."""
        mode = PER_EXPERT if self.layout.per_expert else REDUCED
        slots, weights = arrived.slots_NK, arrived.weights_NK
        self._combine_send(at, mode, y, slots, weights, arrived.tokens_R)

    def combine_segments(self, at: int, y: Tensor, arrived: Arrived, segments: Segments) -> None:
        """Sends home rows y [places, H] in the order of `segments`; weighs them unless per
        expert."""
        mode = PER_EXPERT_INDEXED if self.layout.per_expert else INDEXED
        places = segments.places_NK
        self._combine_send(at, mode, y, places, arrived.weights_NK, arrived.tokens_R)

    def combine_masked(self, at: int, y: Tensor, masked: Masked) -> None:
        """Sends home y [S, C, H] that lies like `masked`."""
        mode = PER_EXPERT_INDEXED if self.layout.per_expert else INDEXED
        self._combine_send(at, mode, y, masked.places, masked.weights, masked.tokens_R)

    def _combine_send(
        self,
        at: int,
        mode: int,
        y: Tensor,
        slots: Tensor,
        weights: Tensor,
        tokens_R: Tensor,
    ) -> None:
        self.check()
        layout = self.layout
        start, work = at * layout.set_bytes, layout.ranks * layout.units
        combine_send[(self._grid(work),)](
            y, slots, weights, tokens_R, self._buffer.table, self._epochs[at, _COMBINE],
            self._sent[_COMBINE], layout.hidden, layout.top_k, slots.shape[1], layout.ranks,
            self.rank, layout.max_tokens, layout.units, start + layout.counts(_COMBINE),
            start + layout.flags(_COMBINE), start + layout.home,
            CHUNK=layout.chunk, BLOCK=self._groups * 128, MODE=mode, UNROLL=_UNROLL,
            R_MAX=self._ranks_bound, INTERPRET=self.interpret, num_warps=_WARPS, maxnreg=_REGISTERS,
        )  # fmt: skip

    def combine_home(
        self, at: int, slots_TK: Tensor, weights_TK: Tensor, y: Tensor | None = None
    ) -> Tensor:
        """[T, H]: what came home, summed. y: as given to `combine_rows`, after that alone."""
        layout, tokens = self.layout, slots_TK.shape[0]
        out_TH = torch.empty(tokens, layout.hidden, dtype=self.dtype, device=self.device)
        cells = layout.max_tokens * layout.top_k if layout.per_expert else layout.cells
        start = at * layout.set_bytes + layout.home
        home = self._buffer.view(start, (cells, layout.hidden), self.dtype)
        mode = PER_EXPERT if layout.per_expert else INDEXED if y is None else REDUCED
        # Products and sums are rounded one by one, as the other transports do.
        combine_home[(self._grid(-(-tokens // layout.chunk)),)](
            home, home if y is None else y, slots_TK, weights_TK, *self._words(at, _COMBINE),
            self._epochs[at, _COMBINE], out_TH, tokens, layout.hidden, slots_TK.shape[1],
            self.slots, layout.ranks, self.rank, layout.max_tokens, layout.units, *self._giving_up,
            CHUNK=layout.chunk, BLOCK=self._groups * 128, MODE=mode, R_MAX=self._ranks_bound,
            INTERPRET=self.interpret, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return out_TH

    def rows_sent(self) -> list[list[int]]:
        """Totals `[dispatch, combine]` by rank; asks the device."""
        return self._sent.tolist()

    def check(self) -> None:
        """
        Raises:
            RankLost: a wait gave up; nothing that came since can be used.
        """
        if code := int(self._seen[0]):
            stage, peer = STAGES[code >> 32], (code & 0xFFFFFFFF) - 1
            raise RankLost(
                f"rank {peer} did not come to {stage} in time; rank {self.rank} gave up", peer
            )

    @property
    def _giving_up(self) -> tuple[Tensor, Tensor, int]:
        return self._error, self._mirror, self._limit

    def _grid(self, work: int) -> int:
        return max(1, min(work, self._programs))

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _words(self, at: int, phase: int) -> tuple[Tensor, Tensor]:
        layout = self.layout
        start = at * layout.set_bytes
        counts = self._buffer.view(start + layout.counts(phase), (layout.ranks,), torch.int64)
        flags = (layout.ranks * layout.units,)
        return counts, self._buffer.view(start + layout.flags(phase), flags, torch.int64)

    def _records(self, at: int) -> Tensor:
        layout = self.layout
        start = at * layout.set_bytes + layout.records
        return self._buffer.view(start, (layout.cells, 2 * MAX_K), torch.int32)

    def _staged(self, at: int) -> tuple[Tensor, Tensor | None]:
        layout = self.layout
        start, dtype = at * layout.set_bytes, torch.float8_e4m3fn if layout.fp8 else self.dtype
        shape = (layout.cells, layout.hidden)
        rows = self._buffer.view(start + layout.rows, shape, dtype)
        if not layout.fp8:
            return rows, None
        groups = (layout.cells, layout.hidden // 128)
        return rows, self._buffer.view(start + layout.scales, groups, torch.float32)
