# mypy: disable-error-code="no-untyped-def"
"""What the attention kernels share: cutting sequences into items, page lookups, merging of parts.

Decoding one token reads a whole sequence, so long ones are cut into items that run at once
(flash-decoding); every sequence has the same item length, chosen on the device from all lengths,
so that a fixed grid is even for any mix of them. Prefill cuts its queries the same way.

    lens (0, 300, 1000), items of 512: first (0, 0, 1, 3), seq (1, 2, 2)

Nothing here asks the host, and all results lie in tensors that can keep their addresses: a launch
can be captured in a CUDA graph and replayed with other lengths. Letters beyond the shape legend:
W items (an upper bound), G kv heads, P pages of a sequence, V width of a value.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows

LOG2_E = 1.4426950408889634
LIFT = tl.constexpr(14.0)
"""Of the exponents of weights over an E4M3 cache: the largest is 2^14 to 2^15, the smallest that
FP16 holds 2^-38 of that."""
MULTIPLE = 128
"""Items of keys start at multiples of this, as the kernels' tiles do."""
SIZES = 3
"""Lengths that are weighed against each other: for 1, 2 or 4 rounds. More would be evener, but
programs without an item are launched too."""
START_KEYS = 256
"""What starting and merging an item costs, in keys."""


@dataclass(frozen=True)
class KeyTile:
    """Keys of a step, warps of a program, tiles in flight."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class Split:
    """int32, on the device. Item w is part `w - first[b]` of sequence `b = seq[w]`, `chunk` tokens
    long; there are `first[B]` items."""

    first_B1: Tensor
    seq_W: Tensor
    chunk: Tensor

    @property
    def items(self) -> int:
        """The upper bound that grids are launched with."""
        return self.seq_W.shape[0]


@triton.jit(
    do_not_specialize=["sequences", "slots", "least", "most"],
    do_not_specialize_on_alignment=["lens_ptr"],
)
def _split_kernel(
    lens_ptr, first_ptr, seq_ptr, chunk_ptr, sequences, slots, least, most,
    FIXED: tl.constexpr, CUMULATIVE: tl.constexpr, MULTIPLE: tl.constexpr, START: tl.constexpr,
    SIZES: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK_B)
    inside = b < sequences
    if CUMULATIVE:
        lens = tl.load(lens_ptr + b + 1, mask=inside, other=0)
        lens = (lens - tl.load(lens_ptr + b, mask=inside, other=0)).to(tl.int32)
    else:
        lens = tl.load(lens_ptr + b, mask=inside, other=0).to(tl.int32)
    lens = tl.minimum(lens, most)
    chunk = least
    if not FIXED:
        total = tl.sum(lens, axis=0)
        longest = tl.max(lens, axis=0)
        least_cost = 1 << 30
        for i in tl.static_range(SIZES):
            even = tl.maximum(tl.cdiv(total, slots << i), least)
            size = tl.cdiv(even, MULTIPLE) * MULTIPLE
            rounds = tl.cdiv(tl.sum((lens + size - 1) // size, axis=0), slots)
            cost = rounds * (tl.minimum(size, longest) + START)
            chunk = tl.where(cost < least_cost, size, chunk)
            least_cost = tl.minimum(cost, least_cost)
    items = (lens + chunk - 1) // chunk
    ends = tl.cumsum(items, axis=0)
    starts = ends - items
    tl.store(first_ptr, 0)
    tl.store(first_ptr + 1 + b, ends, mask=inside)
    tl.store(chunk_ptr, chunk)
    parts = tl.max(items, axis=0)
    i = 0
    while i < parts:
        tl.store(seq_ptr + starts + i, b, mask=inside & (i < items))
        i += 1


def _run_split(
    lens: Tensor, split: Split, slots: int, least: int, most: int | None, cumulative: bool
) -> Split:
    sequences = split.first_B1.shape[0] - 1
    _split_kernel[(1,)](
        lens, split.first_B1, split.seq_W, split.chunk, sequences, slots, least,
        (1 << 30) if most is None else most,
        FIXED=slots == 0, CUMULATIVE=cumulative, MULTIPLE=MULTIPLE, START=START_KEYS, SIZES=SIZES,
        BLOCK_B=triton.next_power_of_2(max(sequences, 16)),
    )  # fmt: skip
    return split


def empty_split(sequences: int, items: int, device: torch.device | str) -> Split:
    make = lambda n: torch.zeros(n, dtype=torch.int32, device=device)  # noqa: E731
    return Split(make(sequences + 1), make(max(items, 1)), make(1))


def split_keys(
    lens_B: Tensor, slots: int, window: int | None = None, out: Split | None = None
) -> Split:
    """Items of decoding. Their length, at least 128 keys, is the one that takes the fewest rounds
    of `slots` items at once, weighed by length: few long ones cost least where they come out even.

    Args:
        lens_B: int, keys of each sequence; 0 for an empty row. At most `window` of them are read.
        out: where to write, from an earlier call of the same B and slots.
    """
    B = lens_B.shape[0]
    split = out or empty_split(B, (slots << (SIZES - 1)) + B, lens_B.device)
    return _run_split(lens_B, split, slots, MULTIPLE, window, False)


def split_queries(cu_B1: Tensor, rows: int, tile: int, out: Split | None = None) -> Split:
    """Items of `tile` query rows; cu_B1: int, [B + 1] starts of the sequences in `rows` rows."""
    B = cu_B1.shape[0] - 1
    split = out or empty_split(B, rows // tile + B, cu_B1.device)
    return _run_split(cu_B1, split, 0, tile, None, True)


def split_twin(lens: list[int], chunk: int) -> tuple[list[int], list[int]]:
    """`(first, seq)` for items of `chunk`."""
    first, seq = [0], []
    for b, length in enumerate(lens):
        seq += [b] * -(-length // chunk)
        first.append(len(seq))
    return first, seq


@triton.jit
def paged_slots(table_ptr, pos, end, PAGE: tl.constexpr):
    """int64 slots of the positions; those from `end` on give slots of page 0."""
    page = tl.load(table_ptr + pos // PAGE, mask=pos < end, other=0).to(tl.int64)
    return page * PAGE + pos % PAGE


@triton.jit
def as_operand(x, dtype: tl.constexpr):
    """What `tl.dot` can take; the interpreter's products of BF16 would multiply the bits."""
    return x.to(tl.float32) if INTERPRET else x.to(dtype)


@triton.jit
def query_operand(q, dtype: tl.constexpr):
    """As `as_operand`, kept within range where that is FP16: codes of E4M3 become FP16 in one
    instruction and keep their bits, while BF16 takes several."""
    if dtype == tl.float16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0)
    return as_operand(q, dtype)


@triton.jit
def value_units(scale):
    """Of the scales of values in E4M3: the power of two below each, as its logarithm and its
    inverse, and how often the scale is that, 1 to 2. The logarithm goes on scores, so that weights
    count codes and the largest of them is `LIFT`ed, however small a value; the inverse takes the
    unit out of the sum of weights. Slots that nobody has written have scales of 0."""
    scale = tl.maximum(scale, 1e-20)
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, scale * inverse


@triton.jit
def weights_operand(p, dtype: tl.constexpr):
    """fp32 softmax weights as an operand, rounded to `dtype`."""
    q = cast_rows(p, dtype, INTERPRET)
    return q.to(tl.float32) if INTERPRET else q


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, first_ptr, out_ptr, heads, stride_b, stride_h,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, ITEMS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    item = tl.load(first_ptr + b)
    last = tl.load(first_ptr + b + 1)
    if not (WHOLE & (last - item == 1)):
        _merge_items(
            part_ptr, lse_ptr, out_ptr, heads, stride_b, stride_h, b, item, last, WIDTH, BLOCK_V,
            BLOCK_H, ITEMS,
        )  # fmt: skip


@triton.jit
def _merge_items(
    part_ptr, lse_ptr, out_ptr, heads, stride_b, stride_h, b, item, last,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (h < heads)[:, None] & (v < WIDTH)[None, :]
    best = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    while item < last:
        w = item + tl.arange(0, ITEMS)
        row = w[:, None].to(tl.int64) * heads + h[None, :]
        here = (w < last)[:, None] & (h < heads)[None, :]
        lse = tl.load(lse_ptr + row, mask=here, other=-1e30)
        at = part_ptr + row[:, :, None] * WIDTH + v[None, None, :]
        part = tl.load(at, mask=here[:, :, None] & (v < WIDTH)[None, None, :], other=0.0)
        higher = tl.maximum(best, tl.max(lse, axis=0))
        weight = tl.where(here, tl.exp2(lse - higher[None, :]), 0.0)
        shrink = tl.exp2(best - higher)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        best = higher
        item += ITEMS
    out = acc / tl.where(total > 0, total, 1.0)[:, None]  # zeros where there was no item
    at = out_ptr + b.to(tl.int64) * stride_b + h[:, None] * stride_h + v[None, :]
    tl.store(at, cast_rows(out, out_ptr.dtype.element_ty, INTERPRET), mask=inside)


def merge(
    part_WhV: Tensor, lse_Wh: Tensor, split: Split, out_BhV: Tensor, whole: bool = False
) -> Tensor:
    """Sequences from their items. part: fp32, each item's own softmax average; lse: the base-2
    logarithm of its sum of weights. A sequence without items gives zeros. whole: those of a single
    item are in `out` already."""
    _, heads, width = part_WhV.shape
    # Few rows have many items each, and many rows few.
    many = out_BhV.shape[0] * heads >= 4096
    block_h, items = (4, 4) if many else (1, 16)
    block_v = min(512 if many else 128, triton.next_power_of_2(width))
    grid = (out_BhV.shape[0], triton.cdiv(heads, block_h), triton.cdiv(width, block_v))
    _merge_kernel[grid](
        part_WhV, lse_Wh, split.first_B1, out_BhV, heads, out_BhV.stride(0), out_BhV.stride(1),
        WIDTH=width, BLOCK_V=block_v, BLOCK_H=block_h, ITEMS=items, WHOLE=whole, num_warps=4,
    )  # fmt: skip
    return out_BhV


def gather_paged(rows_S: Tensor, table_P: Tensor, length: int, page_size: int) -> Tensor:
    """Torch: the first `length` rows of a sequence out of the paged `rows`; used by the twins."""
    pos = torch.arange(length, device=rows_S.device)
    return rows_S[table_P.long()[pos // page_size] * page_size + pos % page_size]
