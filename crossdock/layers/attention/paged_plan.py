"""What all layers of one forward share on the kernels' path: a few tensors on the device.

Nothing is read back to the host, so that a decode step can be captured in a CUDA graph: its inputs
lie in `DecodeBuffers`, at addresses that stay, and the plan of a size is made of views of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.core import ForwardBatch, GQASpec, MLASpec
from crossdock.kernels import attention_gqa, attention_mla
from crossdock.kernels.attention_prefill import tile_tokens
from crossdock.kernels.attention_split import Split, split_keys, split_queries
from crossdock.layers.rope import Rope


@dataclass(frozen=True, eq=False)
class PagedDecode:
    """The first `count` rows, one per sequence. lens_B: int32 keys of each, 0 for an empty row."""

    count: int
    table_BP: Tensor
    lens_B: Tensor
    split: Split


@dataclass(frozen=True, eq=False)
class PagedPrefill:
    """The rows from `start` on. cu_q_B1: where sequences start among them. MLA expands the keys of
    all sequences, one after another: cu_k_B1, and the slot of each, slots_N."""

    start: int
    table_BP: Tensor
    lens_B: Tensor
    cu_q_B1: Tensor
    split: Split
    cu_k_B1: Tensor | None = None
    slots_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """positions_T; slots_T: -1 for an empty row. cos_PD, sin_PD: the whole tables."""

    positions_T: Tensor
    slots_T: Tensor
    cos_PD: Tensor
    sin_PD: Tensor
    page_size: int
    window: int | None
    decode: PagedDecode | None = None
    prefill: PagedPrefill | None = None


class PagedPlanner:
    def __init__(self, spec: GQASpec | MLASpec, rope: Rope, device: torch.device):
        self.rope, self.mla = rope, isinstance(spec, MLASpec)
        self.window = None
        if isinstance(spec, MLASpec):
            self.slots, group = attention_mla.decode_slots(spec.num_heads, device), 1
        else:
            self.slots = attention_gqa.decode_slots(spec.num_kv_heads, device)
            group, self.window = spec.num_heads // spec.num_kv_heads, spec.sliding_window
        self.tile = tile_tokens(group)

    def __call__(self, batch: ForwardBatch, page_size: int) -> PagedPlan:
        device = batch.positions_T.device
        lens_B = torch.tensor(batch.kv_lens, dtype=torch.int32).to(device, non_blocking=True)
        n = batch.num_decodes
        decode = self.decode(batch.page_table_BP[:n], lens_B[:n]) if n else None
        prefill = self._prefill(batch, lens_B, page_size) if n < len(batch.kv_lens) else None
        return self.plan(batch.positions_T, batch.kv_slots_T, page_size, decode, prefill)

    def plan(
        self,
        positions_T: Tensor,
        slots_T: Tensor,
        page_size: int,
        decode: PagedDecode | None,
        prefill: PagedPrefill | None = None,
    ) -> PagedPlan:
        cos, sin = self.rope.cos_PD, self.rope.sin_PD
        return PagedPlan(positions_T, slots_T, cos, sin, page_size, self.window, decode, prefill)

    def decode(self, table_BP: Tensor, lens_B: Tensor) -> PagedDecode:
        split = split_keys(lens_B, self.slots, self.window)
        return PagedDecode(lens_B.shape[0], table_BP, lens_B, split)

    def _prefill(self, batch: ForwardBatch, lens_B: Tensor, page_size: int) -> PagedPrefill:
        n = batch.num_decodes
        rows = batch.num_tokens - n
        queries = torch.tensor((0, *batch.query_lens[n:]), dtype=torch.int32)
        cu_q = queries.cumsum(0, dtype=torch.int32).to(lens_B.device, non_blocking=True)
        split = split_queries(cu_q, rows, self.tile)
        table_BP, lens_B = batch.page_table_BP[n:], lens_B[n:]
        if not self.mla:
            return PagedPrefill(n, table_BP, lens_B, cu_q, split)
        keys = sum(batch.kv_lens[n:])
        cu_k = torch.zeros_like(cu_q)
        torch.cumsum(lens_B, 0, dtype=torch.int32, out=cu_k[1:])
        seq_N = torch.repeat_interleave(lens_B, output_size=keys)
        pos_N = torch.arange(keys, device=lens_B.device) - cu_k[seq_N]
        slots_N = table_BP[seq_N, pos_N // page_size] * page_size + pos_N % page_size
        return PagedPrefill(n, table_BP, lens_B, cu_q, split, cu_k, slots_N)


class DecodeBuffers:
    """Inputs of captured decode steps, of up to `rows` sequences and `pages` pages each."""

    def __init__(self, rows: int, pages: int, page_size: int, device: torch.device):
        make = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)  # noqa: E731
        self.page_size = page_size
        self.positions_T, self.slots_T, self.table_BP = make(rows), make(rows), make(rows, pages)
        self.lens_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rows_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def plan(self, planner: PagedPlanner, size: int) -> PagedPlan:
        """For the first `size` rows; called while capturing, so that each replay cuts anew."""
        decode = planner.decode(self.table_BP[:size], self.lens_B[:size])
        return planner.plan(self.positions_T[:size], self.slots_T[:size], self.page_size, decode)

    def load(self, batch: ForwardBatch) -> None:
        """Before a replay: `batch` holds decodes only. The rows beyond it become empty ones: they
        see no key, write none, and the router gives them no expert (`rows_1` holds their start).

        Raises:
            ValueError: more sequences or pages than there is room for, or prefills.
        """
        n, width = batch.page_table_BP.shape
        if batch.num_decodes != n or n > self.table_BP.shape[0] or width > self.table_BP.shape[1]:
            raise ValueError(
                f"{n} sequences ({batch.num_decodes} decodes) of {width} pages do not fit buffers"
                f" for {self.table_BP.shape[0]} decodes of {self.table_BP.shape[1]} pages"
            )
        self.slots_T[n:].fill_(-1)
        self.positions_T[n:].zero_()
        self.lens_B[n:].zero_()
        self.rows_1.fill_(n)
        self.positions_T[:n].copy_(batch.positions_T, non_blocking=True)
        self.slots_T[:n].copy_(batch.kv_slots_T, non_blocking=True)
        self.table_BP[:n, :width].copy_(batch.page_table_BP, non_blocking=True)
        self.lens_B[:n].copy_(torch.tensor(batch.kv_lens, dtype=torch.int32), non_blocking=True)
