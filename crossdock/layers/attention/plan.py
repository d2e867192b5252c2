"""What all layers of one forward share: positions, cache slots, masks. Built once per batch.

Rows go one of two ways. In ordinary mode sequences with one token are padded to one batch and the
others run one by one; in invariant mode every row is a query of its own over fixed key blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.core import ForwardBatch
from crossdock.layers.rope import Rope

KEY_BLOCK = 128


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The first `count` rows, one per sequence. slots: [count * N]; bias_BN: 0, or -inf where there
    is nothing to see."""

    count: int
    slots: Tensor
    bias_BN: Tensor


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """Rows `start` .. `end` of one sequence. slots_N: all it may see, this step's rows last;
    bias_TN None: plain causal, the rows are the whole sequence."""

    start: int
    end: int
    slots_N: Tensor
    bias_TN: Tensor | None


@dataclass(frozen=True, eq=False)
class KeyBlock:
    """Positions `j * KEY_BLOCK` .. of every row's own sequence. slots: [T * KEY_BLOCK]."""

    slots: Tensor
    bias_TN: Tensor


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    cos_T1D: Tensor
    sin_T1D: Tensor
    slots_T: Tensor
    decodes: DecodeRows | None = None
    prefills: tuple[PrefillRows, ...] = ()
    blocks: tuple[KeyBlock, ...] = ()


@dataclass(frozen=True, eq=False)
class AttentionPlanner:
    """`window`: how many tokens back a token sees, itself included; None is all of them."""

    rope: Rope
    dtype: torch.dtype
    window: int | None
    invariant: bool

    def __call__(self, batch: ForwardBatch, page_size: int) -> AttentionPlan:
        cos, sin = self.rope.at(batch.positions_T)
        if self.invariant:
            blocks = self._blocks(batch, page_size)
            return AttentionPlan(cos, sin, batch.kv_slots_T, blocks=blocks)
        decodes = self._decodes(batch, page_size) if batch.num_decodes else None
        return AttentionPlan(cos, sin, batch.kv_slots_T, decodes, self._prefills(batch, page_size))

    def _decodes(self, batch: ForwardBatch, page_size: int) -> DecodeRows:
        count = batch.num_decodes
        pages = -(-max(batch.kv_lens[:count]) // page_size)
        slots_BN = _slots(batch.page_table_BP[:count, :pages], page_size)
        bias = self._bias(batch.positions_T[:count], slots_BN.shape[1])
        return DecodeRows(count, slots_BN.flatten(), bias)

    def _prefills(self, batch: ForwardBatch, page_size: int) -> tuple[PrefillRows, ...]:
        rows, start = [], batch.num_decodes
        for i in range(batch.num_decodes, len(batch.query_lens)):
            end, seen = start + batch.query_lens[i], batch.kv_lens[i]
            pages = batch.page_table_BP[i : i + 1, : -(-seen // page_size)]
            whole = seen == batch.query_lens[i] and (self.window is None or seen <= self.window)
            bias = None if whole else self._bias(batch.positions_T[start:end], seen)
            rows.append(PrefillRows(start, end, _slots(pages, page_size)[0, :seen], bias))
            start = end
        return tuple(rows)

    def _blocks(self, batch: ForwardBatch, page_size: int) -> tuple[KeyBlock, ...]:
        lens = torch.tensor(batch.query_lens, device=batch.positions_T.device)
        sequence_T = torch.repeat_interleave(lens)
        longest = max(batch.kv_lens)
        positions_N = torch.arange(-(-longest // KEY_BLOCK) * KEY_BLOCK, device=lens.device)
        # Beyond the last page anything may be read: it is masked.
        page_N = (positions_N // page_size).clamp_(max=batch.page_table_BP.shape[1] - 1)
        slots_BN = batch.page_table_BP[:, page_N] * page_size + positions_N % page_size
        blocks = []
        for first in range(0, positions_N.shape[0], KEY_BLOCK):
            slots_TN = slots_BN[:, first : first + KEY_BLOCK][sequence_T]
            bias = self._bias(batch.positions_T, KEY_BLOCK, first)
            blocks.append(KeyBlock(slots_TN.flatten(), bias))
        return tuple(blocks)

    def _bias(self, positions_T: Tensor, width: int, first: int = 0) -> Tensor:
        """[T, width]: 0 where a row at `positions_T` sees key position `first + column`."""
        key_N = torch.arange(first, first + width, device=positions_T.device)
        hidden_TN = key_N > positions_T[:, None]
        if self.window is not None:
            hidden_TN |= key_N <= positions_T[:, None] - self.window
        dtype = torch.float32 if self.invariant else self.dtype
        bias_TN = torch.zeros(hidden_TN.shape, dtype=dtype, device=positions_T.device)
        return bias_TN.masked_fill_(hidden_TN, -torch.inf)


def _slots(pages_BP: Tensor, page_size: int) -> Tensor:
    """[B, P * page_size]: the slots of every position of the pages."""
    offsets = torch.arange(page_size, device=pages_BP.device)
    return (pages_BP[:, :, None] * page_size + offsets).flatten(1)
