"""What all layers of one forward share on the kernels' path: a few tensors on the device.

Nothing is read back to the host, so that a step can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.core import ForwardBatch, GQASpec, MLASpec
from crossdock.kernels import attention_gqa, attention_mla
from crossdock.kernels.attention_prefill import tile_tokens
from crossdock.kernels.attention_split import Split, split_keys, split_queries
from crossdock.layers.rope import Rope

COPIED_KEYS = 1 << 17
"""Of prompts at once, where attention copies keys. Sequences may share the pages of a prefix but
not its copies: a step's new tokens do not bound the keys that they see."""


@dataclass(frozen=True, eq=False)
class Decodes:
    """The first `count` rows, one per sequence. lens_B: int32 keys of each, 0 for an empty row."""

    count: int
    lens_B: Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """The rows from `start` on."""

    start: int


@dataclass(frozen=True, eq=False)
class PagedDecode(Decodes):
    table_BP: Tensor
    split: Split


@dataclass(frozen=True, eq=False)
class Turn:
    """Sequences of prompts that attend at once: `rows` of the prompts', cu_q_B1: where sequences
    start among them. MLA expands the keys of all sequences, and GQA gathers those of an FP8 cache,
    one after another: cu_k_B1, and the slot of each, slots_N (beyond the last key any slot)."""

    rows: slice
    table_BP: Tensor
    lens_B: Tensor
    cu_q_B1: Tensor
    split: Split
    cu_k_B1: Tensor | None = None
    slots_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PagedPrefill(Prompts):
    turns: tuple[Turn, ...]


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """positions_T; slots_T: -1 for an empty row. cos_PD, sin_PD: the whole tables."""

    positions_T: Tensor
    slots_T: Tensor
    cos_PD: Tensor
    sin_PD: Tensor
    page_size: int
    window: int | None
    decode: Decodes | None = None
    prefill: Prompts | None = None

    def join(self, decoded: Tensor | None, prefilled: Tensor | None) -> Tensor:
        """What both kinds of rows came to, in the order of the rows."""
        if decoded is None or prefilled is None:
            one = prefilled if decoded is None else decoded
            assert one is not None
            return one
        assert self.decode is not None and self.prefill is not None
        if self.prefill.start:
            return torch.cat((decoded, prefilled))
        # Captured: only the device knows where decodes end and prompts begin.
        n, lens_B = self.decode.count, self.decode.lens_B
        is_decode = (lens_B > 0).view(-1, *(1,) * (decoded.dim() - 1))
        torch.where(is_decode, decoded, prefilled[:n], out=prefilled[:n])
        return prefilled


class PagedPlanner:
    def __init__(self, spec: GQASpec | MLASpec, rope: Rope, device: torch.device, fp8_cache: bool):
        self.rope, self.mla = rope, isinstance(spec, MLASpec)
        self.gathers = self.mla or fp8_cache
        self.window = None
        if isinstance(spec, MLASpec):
            self.slots, group = attention_mla.decode_slots(spec.num_heads, device), 1
        else:
            self.slots = attention_gqa.decode_slots(spec.num_kv_heads, device)
            group, self.window = spec.num_heads // spec.num_kv_heads, spec.sliding_window
        self.tile = tile_tokens(group)

    def __call__(self, batch: ForwardBatch, page_size: int) -> PagedPlan:
        n = batch.num_decodes
        return PagedPlan(
            batch.positions_T,
            batch.kv_slots_T,
            self.rope.cos_PD,
            self.rope.sin_PD,
            page_size,
            self.window,
            self._decode(batch, page_size) if n else None,
            None if batch.prefill_starts_B1 is None else self._prefill(batch, page_size),
        )

    def _decode(self, batch: ForwardBatch, page_size: int) -> Decodes:
        n = batch.num_decodes
        table_BP, lens_B = batch.page_table_BP[:n], batch.kv_lens_B[:n]
        return PagedDecode(n, lens_B, table_BP, split_keys(lens_B, self.slots, self.window))

    def _prefill(self, batch: ForwardBatch, page_size: int) -> Prompts:
        start = 0 if batch.rows_1 is not None else batch.num_decodes
        B, rows = len(batch.kv_lens_B) - batch.num_decodes, batch.num_tokens - start
        if not self.gathers:
            return PagedPrefill(start, (self._turn(batch, range(B), slice(0, rows)),))
        if batch.rows_1 is not None:  # with room for so many keys
            turn = self._turn(batch, range(B), slice(0, rows), batch.prefill_keys, page_size)
            return PagedPrefill(start, (turn,))
        query_lens, kv_lens = (x[batch.num_decodes :] for x in (batch.query_lens, batch.kv_lens))
        turns, first = [], 0
        for those in in_turns(kv_lens):
            mine = slice(those.start, those.stop)
            end = first + sum(query_lens[mine])
            keys = sum(kv_lens[mine])
            turns.append(self._turn(batch, those, slice(first, end), keys, page_size))
            first = end
        return PagedPrefill(start, tuple(turns))

    def _turn(
        self, batch: ForwardBatch, those: range, rows: slice, keys: int = 0, page_size: int = 0
    ) -> Turn:
        """Of sequences `those` after the decodes; with `keys`, so many are copied."""
        assert batch.prefill_starts_B1 is not None
        n, cu_q = batch.num_decodes, batch.prefill_starts_B1[those.start : those.stop + 1]
        if rows.start:
            cu_q = cu_q - rows.start
        mine = slice(n + those.start, n + those.stop)
        table_BP, lens_B = batch.page_table_BP[mine], batch.kv_lens_B[mine]
        split = split_queries(cu_q, rows.stop - rows.start, self.tile)
        if not keys:
            return Turn(rows, table_BP, lens_B, cu_q, split)
        cu_k = torch.zeros_like(cu_q)
        torch.cumsum(lens_B, 0, dtype=torch.int32, out=cu_k[1:])
        key_N = torch.arange(keys, dtype=torch.int32, device=cu_k.device)
        seq_N = torch.searchsorted(cu_k[1:], key_N, right=True).clamp_(max=len(lens_B) - 1)
        pos_N = key_N - cu_k[seq_N]
        page_N = (pos_N // page_size).clamp_(max=table_BP.shape[1] - 1)
        slots_N = table_BP[seq_N, page_N] * page_size + pos_N % page_size
        return Turn(rows, table_BP, lens_B, cu_q, split, cu_k, slots_N)


def in_turns(kv_lens: Sequence[int]) -> list[range]:
    """Of sequences, in order, so that each turn has at most `COPIED_KEYS` keys or one sequence."""
    turns, first, keys = [], 0, 0
    for i, length in enumerate(kv_lens):
        if i > first and keys + length > COPIED_KEYS:
            turns.append(range(first, i))
            first, keys = i, 0
        keys += length
    return [*turns, range(first, len(kv_lens))]
