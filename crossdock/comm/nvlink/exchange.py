"""Launching the kernels of one exchange: tensors in, device tensors out, no word from the host.

Buffer sets are independent of each other: each has its epochs, flags and rows. Within a set
dispatch and combine alternate, and then no acknowledgement is needed: a rank begins to overwrite a
peer's staging only after it has ended the combine before, for which that peer raised its flags
after it had read the staging; and cells at home likewise. Exchanges that only dispatch (or only
combine) are safe when they use the sets in turn. Everything combine needs of a dispatch is copied
out of the staging, since a peer without tokens may be a step ahead.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.checks import expect, explain
from crossdock.comm.nvlink.handles import Arrived, Masked, Segments, Sending
from crossdock.comm.nvlink.layout import LOW_LATENCY_TOKENS, SETS, NvlinkLayout
from crossdock.comm.symmetric import SymmetricBuffer
from crossdock.core import CapacityError, CrossdockError
from crossdock.kernels.combine import (
    INDEXED,
    PER_EXPERT,
    PER_EXPERT_INDEXED,
    REDUCED,
    combine_fused,
    combine_home,
    combine_send,
)
from crossdock.kernels.dispatch import (
    MAX_K,
    SPAN,
    dispatch_fused,
    dispatch_masked,
    dispatch_rows,
    dispatch_send,
)
from crossdock.kernels.segments import place_rows

__all__ = ["Arrived", "Masked", "NvlinkExchange", "Segments"]

_DISPATCH, _COMBINE = range(2)
_ROUNDS_PER_S = 5000
"""Of a wait in the interpreter, about."""
_WARPS = 8
_PUSHING = {"num_warps": 8}
_COPYING = {"num_warps": 4}
_REDUCING = {"UNROLL": 4, "num_warps": 16, "maxnreg": 64}
_MOVING = {"UNROLL": 1, "num_warps": 8, "maxnreg": 128}
"""Of combine, where rows are reduced on the way and where not."""
_CPU_PROGRAMS = 3


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
        early = on_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._early: dict[str, Any] = {"PDL": early, **({"launch_pdl": True} if early else {})}
        self._limit = int(deadline_s * (_ROUNDS_PER_S if self.interpret else 1e9))
        self._ranks_bound = max(8, triton.next_power_of_2(layout.ranks))
        self._top = triton.next_power_of_2(layout.top_k)
        self._groups = triton.next_power_of_2(layout.hidden // 128)
        R, N = layout.ranks, layout.cells
        self._epochs = self._new((SETS, 2, 3), torch.int64)
        self._sent = self._new((2, R), torch.int64)
        self._error = self._new((1,), torch.int64)
        # Pinned: kernels write it, the host reads it without asking the device.
        mirror = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._mirror, self._seen = mirror, mirror.numpy()
        self._counters = self._new((SETS, 2, slots_per_rank), torch.int32)
        self._tokens = self._new((SETS, R), torch.int32)
        self._places = self._new((SETS, N, MAX_K), torch.int32)
        self._weights = self._new((SETS, N, MAX_K), torch.float32)

    @property
    def programs(self) -> int:
        """Most that a kernel has, each half of one that sends and receives."""
        return self._programs

    def dispatch_send(self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        """Pushes rows of set `at` to all who need them.

        Raises:
            CapacityError: more tokens than the buffers hold.
            RankLost: an earlier wait gave up.
            CrossdockError: x, slots (int64) or weights (fp32) are not what the buffers were made
                for, or an earlier step had a slot that no rank has.
        """
        sending, senders = self._sending(at, x_TH, slots_TK, weights_TK)
        dispatch_send[(1 + senders,)](
            *sending, *self._giving_up[:2],
            CHUNK=self.layout.chunk, GROUPS=self._groups, FP8=self.layout.fp8,
            R_MAX=self._ranks_bound, INTERPRET=self.interpret, num_warps=_WARPS,
        )  # fmt: skip

    def dispatch_rows(self, at: int) -> Arrived:
        """Waits for the rows of set `at` where they lie."""
        layout = self.layout
        arrived = self._arriving(at)
        dispatch_rows[(self._grid(self._spans),)](
            *self._words(at, _DISPATCH), self._records(at), self._epochs[at, _DISPATCH],
            arrived.slots_NK, arrived.weights_NK, arrived.tokens_R, arrived.counts_S,
            layout.top_k, layout.ranks, self.rank, layout.max_tokens, layout.units,
            *self._giving_up, CHUNK=layout.chunk, INTERPRET=self.interpret, num_warps=_WARPS,
        )  # fmt: skip
        return arrived

    def dispatch_rows_fused(
        self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor
    ) -> Arrived:
        """`dispatch_send` and `dispatch_rows` in one launch."""
        arrived = self._arriving(at)
        self._dispatch_fused(
            at, (x_TH, slots_TK, weights_TK), self._spans,
            (arrived.rows, arrived.scales), (arrived.slots_NK, arrived.weights_NK), None,
        )  # fmt: skip
        return arrived

    def dispatch_segments(self, at: int, alignment: int) -> tuple[Arrived, Segments]:
        """`dispatch_rows` and `place`: grouped rows, in either mode, without the host."""
        arrived = self.dispatch_rows(at)
        return arrived, self.place(at, arrived, alignment)

    def place(self, at: int, arrived: Arrived, alignment: int) -> Segments:
        """Where each slot's rows are, for a grouped product. Once for each dispatch."""
        entries = arrived.slots_NK.numel()
        capacity = -(-(entries + self.slots * (alignment - 1)) // alignment) * alignment
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
        masked = self._masking(at, x, scales)
        rows, staged = self._staged(at)
        dispatch_masked[(self._grid(layout.cells),)](
            *self._words(at, _DISPATCH), self._records(at), rows, self._or_spare(staged),
            self._epochs[at, _DISPATCH], masked.places, masked.weights, masked.tokens_R,
            masked.counts_S, x, self._or_spare(scales),
            layout.hidden, layout.ranks, self.rank, layout.max_tokens, layout.units, x.shape[1],
            *self._giving_up,
            GROUPS=self._groups, FP8=layout.fp8, TOP=self._top, INTERPRET=self.interpret,
            **_COPYING,
        )  # fmt: skip
        return masked

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
        masked = self._masking(at, x, scales)
        self._dispatch_fused(
            at, (x_TH, slots_TK, weights_TK), self.layout.cells, self._staged(at),
            (masked.places, masked.weights), (x, scales),
        )  # fmt: skip
        return masked

    def _dispatch_fused(
        self,
        at: int,
        given: tuple[Tensor, Tensor, Tensor],
        receivers: int,
        staged: tuple[Tensor, Tensor | None],
        found: tuple[Tensor, Tensor],
        out: tuple[Tensor, Tensor | None] | None,
    ) -> None:
        """out: where masked rows go; None: rows stay in the staging."""
        layout = self.layout
        sending, senders = self._sending(at, *given)
        x, scales = out or (staged[0], None)
        dispatch_fused[(1 + senders + self._grid(receivers),)](
            *sending, senders, *self._words(at, _DISPATCH), self._records(at), staged[0],
            self._or_spare(staged[1]), *found, self._tokens[at], x, self._or_spare(scales),
            x.shape[1] if out else 0, *self._giving_up,
            CHUNK=layout.chunk, GROUPS=self._groups, FP8=layout.fp8, MASKED=out is not None,
            TOP=self._top, R_MAX=self._ranks_bound, INTERPRET=self.interpret,
            **(_COPYING if out else _PUSHING), **self._early,
        )  # fmt: skip

    def _sending(
        self, at: int, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor
    ) -> tuple[tuple[object, ...], int]:
        """Arguments of the sending half and how many programs it has."""
        self.check()
        layout, tokens = self.layout, x_TH.shape[0]
        if tokens > layout.max_tokens:
            raise CapacityError(
                f"{tokens} tokens in a step, the buffers hold {layout.max_tokens} per rank "
                "(max_num_batched_tokens)"
            )
        self._expect("x", x_TH, (tokens, layout.hidden), self.dtype)
        self._expect_routing(tokens, slots_TK, weights_TK)
        start, counters = at * layout.set_bytes, self._counters[at]
        sending = (
            x_TH, slots_TK, weights_TK, self._buffer.table, self._epochs[at, _DISPATCH],
            self._sent[_DISPATCH], counters, counters.numel(),
            tokens, layout.hidden, layout.top_k, self.slots, layout.ranks, self.rank,
            layout.max_tokens, layout.units,
            start + layout.counts(_DISPATCH), start + layout.flags(_DISPATCH),
            start + layout.records, start + layout.rows, start + layout.scales,
        )  # fmt: skip
        return sending, self._grid(-(-tokens // layout.chunk))

    def _arriving(self, at: int) -> Arrived:
        N, K = self.layout.cells, self.layout.top_k
        slots_NK = torch.empty(N, K, dtype=torch.int64, device=self.device)
        weights_NK = torch.empty(N, K, dtype=torch.float32, device=self.device)
        counts_S = self._counters[at, 0]
        return Arrived(*self._staged(at), slots_NK, weights_NK, self._tokens[at], counts_S)

    def _masking(self, at: int, x: Tensor, scales: Tensor | None) -> Masked:
        layout = self.layout
        if not layout.low_latency or x.shape[1] < layout.cells:
            raise CapacityError(
                f"masked rows need at most {LOW_LATENCY_TOKENS} tokens per rank and "
                f"{layout.cells} places per slot, got {layout.max_tokens} and {x.shape[1]}"
            )
        shape = (self.slots, x.shape[1], layout.hidden)
        self._expect("masked rows", x, shape, torch.float8_e4m3fn if layout.fp8 else self.dtype)
        if layout.fp8 != (scales is not None):
            raise CrossdockError("FP8 rows, and they alone, come with scales")
        if scales is not None:
            groups = (*shape[:2], layout.hidden // 128)
            self._expect("scales", scales, groups, torch.float32)
        return Masked(
            x, scales, self._counters[at, 0], self._tokens[at], self._places[at], self._weights[at]
        )

    def combine_rows(self, at: int, y: Tensor, arrived: Arrived) -> None:
        """Sends home y [N, H], reduced, or per expert [N, K, H], unweighted. `combine_home` wants
        the same y, unchanged."""
        self._combine_send(at, self._of_rows(y, arrived))

    def combine_segments(self, at: int, y: Tensor, arrived: Arrived, segments: Segments) -> None:
        """Sends home rows y [places, H] in the order of `segments`; weighs them unless per
        expert."""
        self._combine_send(at, self._of_segments(y, arrived, segments))

    def combine_masked(self, at: int, y: Tensor, masked: Masked) -> None:
        """Sends home y [S, C, H] that lies like `masked`."""
        self._combine_send(at, self._of_masked(y, masked))

    def combine_home(
        self, at: int, slots_TK: Tensor, weights_TK: Tensor, y: Tensor | None = None
    ) -> Tensor:
        """[T, H]: what came home, summed. y: as given to `combine_rows`, after that alone."""
        layout, tokens = self.layout, slots_TK.shape[0]
        self._expect_routing(tokens, slots_TK, weights_TK)
        out_TH, home = self._going_home(at, tokens)
        mode = PER_EXPERT if layout.per_expert else INDEXED if y is None else REDUCED
        combine_home[(self._grid(-(-tokens // layout.home_chunk)),)](
            home, home if y is None else y, slots_TK, weights_TK, *self._words(at, _COMBINE),
            self._epochs[at, _COMBINE], self._sent[_COMBINE], out_TH, tokens, layout.hidden,
            layout.top_k, self.slots, layout.ranks, self.rank, layout.max_tokens, layout.home_units,
            *self._giving_up,
            **self._combining(mode),
        )  # fmt: skip
        return out_TH

    def combine_rows_fused(
        self, at: int, y: Tensor, arrived: Arrived, slots_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """`combine_rows` and `combine_home` in one launch; so with the two below. All ranks must
        use it in the same order of exchanges, on one stream."""
        return self._combine_fused(at, self._of_rows(y, arrived), slots_TK, weights_TK)

    def combine_segments_fused(
        self,
        at: int,
        y: Tensor,
        arrived: Arrived,
        segments: Segments,
        slots_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        sending = self._of_segments(y, arrived, segments)
        return self._combine_fused(at, sending, slots_TK, weights_TK)

    def combine_masked_fused(
        self, at: int, y: Tensor, masked: Masked, slots_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        return self._combine_fused(at, self._of_masked(y, masked), slots_TK, weights_TK)

    def _of_rows(self, y: Tensor, arrived: Arrived) -> Sending:
        layout = self.layout
        shape: tuple[int, ...] = (layout.cells, layout.hidden)
        if layout.per_expert:
            shape = (layout.cells, layout.top_k, layout.hidden)
        self._expect("y", y, shape, self.dtype)
        mode = PER_EXPERT if layout.per_expert else REDUCED
        return Sending(mode, y, arrived.slots_NK, arrived.weights_NK, arrived.tokens_R)

    def _of_segments(self, y: Tensor, arrived: Arrived, segments: Segments) -> Sending:
        # Rows beyond the last segment are never read, so there may be fewer.
        self._expect("y", y, (y.shape[0], self.layout.hidden), self.dtype)
        weights = arrived.weights_NK
        return Sending(self._indexed, y, segments.places_NK, weights, arrived.tokens_R)

    def _of_masked(self, y: Tensor, masked: Masked) -> Sending:
        self._expect("y", y, tuple(masked.x.shape), self.dtype)
        return Sending(self._indexed, y, masked.places, masked.weights, masked.tokens_R)

    @property
    def _indexed(self) -> int:
        return PER_EXPERT_INDEXED if self.layout.per_expert else INDEXED

    def _combine_send(self, at: int, sending: Sending) -> None:
        self.check()
        layout = self.layout
        combine_send[(layout.ranks * self._lanes,)](
            sending.y, sending.slots, sending.weights, sending.tokens_R, self._buffer.table,
            self._epochs[at, _COMBINE], self._sent[_COMBINE], layout.hidden, layout.top_k,
            sending.slots.shape[1], layout.ranks, self.rank, layout.max_tokens, layout.home_units,
            *self._home_offsets(at),
            **self._combining(sending.mode),
        )  # fmt: skip

    def _combine_fused(
        self, at: int, sending: Sending, slots_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        self.check()
        layout, tokens = self.layout, slots_TK.shape[0]
        self._expect_routing(tokens, slots_TK, weights_TK)
        out_TH, home = self._going_home(at, tokens)
        combine_fused[(layout.ranks * self._lanes,)](
            sending.y, sending.slots, sending.weights, sending.tokens_R, self._buffer.table,
            self._epochs[at, _COMBINE], self._sent[_COMBINE], home, slots_TK, weights_TK,
            *self._words(at, _COMBINE), out_TH, tokens, layout.hidden, layout.top_k,
            sending.slots.shape[1], self.slots, layout.ranks, self.rank, layout.max_tokens,
            layout.home_units, *self._home_offsets(at), *self._giving_up,
            **self._combining(sending.mode), **self._early,
        )  # fmt: skip
        return out_TH

    def _combining(self, mode: int) -> dict[str, Any]:
        # Products and sums are rounded one by one, as the other transports do.
        return {
            "CHUNK": self.layout.home_chunk, "BLOCK": self._groups * 128, "MODE": mode,
            "R_MAX": self._ranks_bound, "INTERPRET": self.interpret, "enable_fp_fusion": False,
            **(_REDUCING if mode == INDEXED else _MOVING),
        }  # fmt: skip

    def _going_home(self, at: int, tokens: int) -> tuple[Tensor, Tensor]:
        layout = self.layout
        out_TH = torch.empty(tokens, layout.hidden, dtype=self.dtype, device=self.device)
        cells = layout.max_tokens * layout.top_k if layout.per_expert else layout.cells
        start = at * layout.set_bytes + layout.home
        return out_TH, self._buffer.view(start, (cells, layout.hidden), self.dtype)

    def _home_offsets(self, at: int) -> tuple[int, int, int]:
        layout, start = self.layout, at * self.layout.set_bytes
        counts, flags = layout.counts(_COMBINE), layout.flags(_COMBINE)
        return start + counts, start + flags, start + layout.home

    def rows_sent(self) -> list[list[int]]:
        """Totals `[dispatch, combine]` by rank; asks the device."""
        return self._sent.tolist()

    def check(self) -> None:
        """
        Raises:
            RankLost: a wait gave up; nothing that came since can be used.
            CapacityError, CrossdockError: slots that cannot be served.
        """
        if code := int(self._seen[0]):
            raise explain(code, self.rank, self.layout.ranks * self.slots)

    def _expect(self, name: str, got: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        expect(name, got, shape, dtype, self.device)

    def _expect_routing(self, tokens: int, slots_TK: Tensor, weights_TK: Tensor) -> None:
        shape = (tokens, self.layout.top_k)
        self._expect("slots", slots_TK, shape, torch.int64)
        self._expect("weights", weights_TK, shape, torch.float32)

    def _or_spare(self, tensor: Tensor | None) -> Tensor:
        """Kernels want a pointer also where they use none."""
        return self._error if tensor is None else tensor

    @property
    def _spans(self) -> int:
        return self.layout.ranks * -(-self.layout.units // SPAN)

    @property
    def _lanes(self) -> int:
        return self._grid(min(self.layout.home_units, self._programs // self.layout.ranks))

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
        flags = (layout.ranks * (layout.units, layout.home_units)[phase],)
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
