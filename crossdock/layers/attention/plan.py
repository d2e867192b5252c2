"""What all layers of one forward share: positions, cache slots, masks. Built once per batch.

Rows go one of two ways. In ordinary mode sequences with one token are padded to one batch and the
others run one by one; in invariant mode every row is a query of its own over fixed key blocks, cut
out in torch on CPUs and by a kernel on GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.core import ForwardBatch
from crossdock.layers.rope import Rope

KEY_BLOCK = 128
SPLIT_GAIN = 1024
"""Padded tokens that cost about what a further group of decodes does: some ten small operations."""


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Rows `start` .. `end` of the decodes in the order of `DecodeRows`, padded to N cached tokens.
    slots: [rows * N]; bias_BN: 0, or -inf where there is nothing to see."""

    start: int
    end: int
    slots: Tensor
    bias_BN: Tensor


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The first `count` rows, one per sequence, in groups of similar length. `order` sorts them for
    the groups and `inverse` brings them back; None where one group takes all."""

    count: int
    groups: tuple[DecodeGroup, ...]
    order: Tensor | None = None
    inverse: Tensor | None = None

    def attend(self, q_B: Tensor, attend: Callable[[Tensor, DecodeGroup], Tensor]) -> Tensor:
        """`attend` group by group; results in the order of `q_B`."""
        if self.order is None or self.inverse is None:
            return attend(q_B, self.groups[0])
        q_B = q_B.index_select(0, self.order)
        parts = [attend(q_B[group.start : group.end], group) for group in self.groups]
        return torch.cat(parts).index_select(0, self.inverse)


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
class FixedRows:
    """What `kernels.attention_invariant` takes. tiles_W3: int32 (sequence, first row, rows)."""

    tiles_W3: Tensor
    positions_T: Tensor
    table_BP: Tensor
    page_size: int
    window: int | None


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    cos_T1D: Tensor
    sin_T1D: Tensor
    slots_T: Tensor
    decodes: DecodeRows | None = None
    prefills: tuple[PrefillRows, ...] = ()
    blocks: tuple[KeyBlock, ...] = ()
    fixed: FixedRows | None = None

    @property
    def by_row(self) -> bool:
        """Of invariant mode."""
        return bool(self.blocks) or self.fixed is not None


@dataclass(frozen=True, eq=False)
class AttentionPlanner:
    """`window`: how many tokens back a token sees, itself included; None is all of them.
    `tile_tokens`: most rows of a tile of the kernel of invariant mode; None: without a kernel."""

    rope: Rope
    dtype: torch.dtype
    window: int | None
    invariant: bool
    tile_tokens: int | None = None

    def __call__(self, batch: ForwardBatch, page_size: int) -> AttentionPlan:
        cos, sin = self.rope.at(batch.positions_T)
        if self.tile_tokens is not None:
            fixed = self._fixed(batch, page_size, self.tile_tokens)
            return AttentionPlan(cos, sin, batch.kv_slots_T, fixed=fixed)
        if self.invariant:
            blocks = self._blocks(batch, page_size)
            return AttentionPlan(cos, sin, batch.kv_slots_T, blocks=blocks)
        decodes = self._decodes(batch, page_size) if batch.num_decodes else None
        return AttentionPlan(cos, sin, batch.kv_slots_T, decodes, self._prefills(batch, page_size))

    def _decodes(self, batch: ForwardBatch, page_size: int) -> DecodeRows:
        count = batch.num_decodes
        lens = batch.kv_lens[:count]
        table_BP, positions_B = batch.page_table_BP[:count], batch.positions_T[:count]
        order = inverse = None
        rows = sorted(range(count), key=lambda row: -lens[row])
        bounds = length_groups([lens[row] for row in rows])
        if len(bounds) > 1:
            order = torch.tensor(rows, device=positions_B.device)
            inverse = order.argsort()
            table_BP, positions_B = table_BP[order], positions_B[order]
        groups = []
        for start, end in bounds:
            pages = -(-lens[rows[start]] // page_size)
            slots_BN = _slots(table_BP[start:end, :pages], page_size)
            slots_BN = _own(slots_BN, positions_B[start:end])
            bias = self._bias(positions_B[start:end], slots_BN.shape[1])
            groups.append(DecodeGroup(start, end, slots_BN.flatten(), bias))
        return DecodeRows(count, tuple(groups), order, inverse)

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

    def _fixed(self, batch: ForwardBatch, page_size: int, step: int) -> FixedRows:
        tiles, start = [], 0
        for sequence, rows in enumerate(batch.query_lens):
            tiles += [(sequence, start + i, min(step, rows - i)) for i in range(0, rows, step)]
            start += rows
        tiles_W3 = torch.tensor(tiles, dtype=torch.int32).to(batch.positions_T.device)
        return FixedRows(tiles_W3, batch.positions_T, batch.page_table_BP, page_size, self.window)

    def _blocks(self, batch: ForwardBatch, page_size: int) -> tuple[KeyBlock, ...]:
        lens = torch.tensor(batch.query_lens, device=batch.positions_T.device)
        sequence_T = torch.repeat_interleave(lens)
        longest = max(batch.kv_lens)
        positions_N = torch.arange(-(-longest // KEY_BLOCK) * KEY_BLOCK, device=lens.device)
        page_N = (positions_N // page_size).clamp_(max=batch.page_table_BP.shape[1] - 1)
        slots_BN = batch.page_table_BP[:, page_N] * page_size + positions_N % page_size
        last_B = torch.tensor(batch.kv_lens, device=lens.device) - 1
        slots_BN = _own(slots_BN, last_B)
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


def length_groups(lens: list[int]) -> list[tuple[int, int]]:
    """Ranges of `lens` (falling), split wherever that saves `SPLIT_GAIN` padded tokens or more."""
    saved = [(lens[0] - length) * (len(lens) - i) for i, length in enumerate(lens)]
    best = max(range(len(lens)), key=saved.__getitem__)
    if saved[best] < SPLIT_GAIN:
        return [(0, len(lens))]
    return length_groups(lens[:best]) + [
        (best + start, best + end) for start, end in length_groups(lens[best:])
    ]


def _own(slots_BN: Tensor, last_B: Tensor) -> Tensor:
    """Beyond a sequence's last position its first slot: a mask is added to scores here, and does
    not hide another sequence's NaN."""
    position_N = torch.arange(slots_BN.shape[1], device=slots_BN.device)
    return torch.where(position_N <= last_B[:, None], slots_BN, slots_BN[:, :1])


def _slots(pages_BP: Tensor, page_size: int) -> Tensor:
    """[B, P * page_size]: the slots of every position of the pages."""
    offsets = torch.arange(page_size, device=pages_BP.device)
    return (pages_BP[:, :, None] * page_size + offsets).flatten(1)
