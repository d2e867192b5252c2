"""What both halves of an exchange share: the words of its kernels on the device, and where things
lie in the buffer."""

from typing import Any

import torch
import triton
from torch import Tensor

from crossdock.comm.nvlink.checks import expect, explain
from crossdock.comm.nvlink.layout import SETS, NvlinkLayout
from crossdock.comm.symmetric import SymmetricBuffer
from crossdock.core import CapacityError
from crossdock.kernels.dispatch import MAX_K

DISPATCH, COMBINE = range(2)
"""Phases, the first index of what each has of its own."""
_ROUNDS_PER_S = 600
"""Of a wait in the interpreter, about."""
_CPU_PROGRAMS = 3
NARROW, _PROGRAMS, _NARROW_PROGRAMS = 2048, 4, 8
"""Programs of a multiprocessor, and of hidden sizes up to NARROW, whose programs have fewer warps:
dispatching 8,192 BF16 rows of 2,048 between two H200 then takes 132 us instead of 158."""


class ExchangeState:
    """epochs int64 [SETS, 2, 3] and sent int64 [2, R] by phase; counters int32 [SETS, 2, S]: rows
    of each slot and cursors of `place_rows`; tokens_R int32 [SETS, R]; places int32 and weights
    fp32 [SETS, N, 16] of masked rows; error int64 [1] and mirror, see `kernels.signals`."""

    def __init__(
        self,
        rank: int,
        layout: NvlinkLayout,
        buffer: SymmetricBuffer,
        slots: int,
        dtype: torch.dtype,
        deadline_s: float,
        programs: int | None,
    ):
        if dtype.itemsize != layout.itemsize or buffer.nbytes < layout.nbytes:
            raise CapacityError(
                f"the layout asks for {layout.nbytes} bytes and elements of {layout.itemsize}, "
                f"got {buffer.nbytes} and {dtype}"
            )
        self.rank, self.layout, self.slots, self.dtype = rank, layout, slots, dtype
        self.buffer, self.device = buffer, buffer.local.device
        self.interpret = bool(triton.knobs.runtime.interpret)
        on_cuda = self.device.type == "cuda"
        if programs is None and on_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            each = _PROGRAMS if layout.hidden > NARROW else _NARROW_PROGRAMS
            programs = each * properties.multi_processor_count
        self.programs = programs or _CPU_PROGRAMS
        early = on_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.early: dict[str, Any] = {"PDL": early, **({"launch_pdl": True} if early else {})}
        self.limit = int(deadline_s * (_ROUNDS_PER_S if self.interpret else 1e9))
        self.ranks_bound = max(8, triton.next_power_of_2(layout.ranks))
        self.groups = triton.next_power_of_2(layout.hidden // 128)
        self.epochs = self._new((SETS, 2, 3), torch.int64)
        self.sent = self._new((2, layout.ranks), torch.int64)
        self.error = self._new((1,), torch.int64)
        # Pinned: kernels write it, the host reads it without asking the device.
        self.mirror = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._seen = self.mirror.numpy()
        self.counters = self._new((SETS, 2, slots), torch.int32)
        self.tokens_R = self._new((SETS, layout.ranks), torch.int32)
        self.places = self._new((SETS, layout.cells, MAX_K), torch.int32)
        self.weights = self._new((SETS, layout.cells, MAX_K), torch.float32)
        self._words: list[list[tuple[Tensor, Tensor]]] = []
        self._records: list[Tensor] = []
        self._staged: list[tuple[Tensor, Tensor | None]] = []
        self._home: list[Tensor] = []
        self._lay_out()

    def check(self) -> None:
        """See `NvlinkExchange.check`."""
        if code := int(self._seen[0]):
            raise explain(code, self.rank, self.layout.ranks * self.slots)

    def expect(self, name: str, got: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        expect(name, got, shape, dtype, self.device)

    def expect_routing(self, tokens: int, slots_TK: Tensor, weights_TK: Tensor) -> None:
        if tokens > self.layout.max_tokens:
            raise CapacityError(
                f"{tokens} tokens in a step, the buffers hold {self.layout.max_tokens} per rank "
                "(max_num_batched_tokens)"
            )
        shape = (tokens, self.layout.top_k)
        self.expect("slots", slots_TK, shape, torch.int64)
        self.expect("weights", weights_TK, shape, torch.float32)

    @property
    def giving_up(self) -> tuple[Tensor, Tensor, int]:
        return self.error, self.mirror, self.limit

    def grid(self, work: int) -> int:
        return max(1, min(work, self.programs))

    def or_spare(self, tensor: Tensor | None) -> Tensor:
        """Kernels want a pointer also where they use none."""
        return self.error if tensor is None else tensor

    def words(self, at: int, phase: int) -> tuple[Tensor, Tensor]:
        """Counts [R] and flags [R * units] that the peers raise here."""
        return self._words[at][phase]

    def records(self, at: int) -> Tensor:
        return self._records[at]

    def staged(self, at: int) -> tuple[Tensor, Tensor | None]:
        """Rows [N, H] and, in FP8, their scales [N, H / 128]."""
        return self._staged[at]

    def home(self, at: int) -> Tensor:
        """Rows that came home [R * T, H] or, per expert, [T * K, H]."""
        return self._home[at]

    def _lay_out(self) -> None:
        """Views of the buffer, made once: making one takes the host as long as a launch."""
        layout, view, wide = self.layout, self.buffer.view, self.layout.hidden
        wire = torch.float8_e4m3fn if layout.fp8 else self.dtype
        home_rows = layout.max_tokens * layout.top_k if layout.per_expert else layout.cells
        for at in range(SETS):
            start = at * layout.set_bytes
            counts, flags = (
                [
                    view(start + where(phase), (layout.ranks * units,), torch.int64)
                    for phase, units in enumerate(sizes)
                ]
                for where, sizes in (
                    (layout.counts, (1, 1)),
                    (layout.flags, (layout.units, layout.home_units)),
                )
            )
            self._words.append(list(zip(counts, flags, strict=True)))
            shape = (layout.cells, 2 * MAX_K)
            self._records.append(view(start + layout.records, shape, torch.int32))
            rows = view(start + layout.rows, (layout.cells, wide), wire)
            scales = None
            if layout.fp8:
                scales = view(start + layout.scales, (layout.cells, wide // 128), torch.float32)
            self._staged.append((rows, scales))
            self._home.append(view(start + layout.home, (home_rows, wide), self.dtype))

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)
