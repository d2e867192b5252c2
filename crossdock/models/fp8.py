"""FP8 weights as models hold them: one product's matrices together, experts by slot.

A checkpoint's codes and scales stay as they are. Where rows in another order, or halves of a fused
tensor, would leave the 128x128 blocks that share a scale, the values are quantised anew; that
happens where a head's rotated rows cross a multiple of 128 or fused experts' width is none, which
no published block-quantised checkpoint has.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core.staging import SCALE_BLOCK as BLOCK
from crossdock.core.staging import padded
from crossdock.layers.fp8 import Fp8Weight, join_fp8

if TYPE_CHECKING:
    from crossdock.models.weights import WeightSource

FP8 = torch.float8_e4m3fn
Matrix = tuple[Tensor, Tensor]
"""Codes [O, I'], I' = I padded with zeros to a multiple of 128; scales [ceil(O / 128), I' / 128].
"""


class Part(NamedTuple):
    """A tensor of a product: its name, its rows, the order in which they are held, and which of
    them this rank holds, in that order."""

    name: str
    rows: int
    order: Tensor | None = None
    own: slice = slice(None)


def quantise(w_OI: Tensor) -> Matrix:
    from crossdock.kernels.quant import quantise_weights  # imports triton

    w_OI = F.pad(w_OI, (0, padded(w_OI.shape[1]) - w_OI.shape[1]))
    codes, scales = quantise_weights(w_OI.unsqueeze(0))
    return codes[0], scales[0]


def stays_in_blocks(order: Tensor) -> bool:
    """Whether rows in this order stay in the blocks whose scale they share."""
    return bool((order // BLOCK == torch.arange(len(order)) // BLOCK).all())


def widen(codes_OI: Tensor, scales_AB: Tensor, order: Tensor | None = None) -> Matrix:
    """A stored matrix with its rows in `order`, which stays in blocks, its width padded."""
    as_bytes = codes_OI.view(torch.uint8)  # for which every operation is there on every device
    if order is not None:
        as_bytes = as_bytes[order.to(as_bytes.device)]
    missing = padded(codes_OI.shape[1]) - codes_OI.shape[1]
    if missing:
        as_bytes = F.pad(as_bytes, (0, missing))
    return as_bytes.view(FP8), scales_AB


def fp8_matrix(
    source: "WeightSource", parts: Sequence[Part], width: int, columns: slice = slice(None)
) -> Fp8Weight | None:
    """The weight of one product, part after part, of which this rank holds `columns`; None if any
    part is to stay as it is."""
    if not all(source.in_fp8(part.name) for part in parts):
        return None
    matrices = [
        cut_fp8(source.get_fp8(p.name, (p.rows, width), order=p.order), p.own, columns)
        for p in parts
    ]
    return join_fp8(matrices)


def cut_fp8(matrix: Matrix, rows: slice, columns: slice) -> Matrix:
    """Both begin and end between blocks, or where the matrix does (`core.check_tp` sees to it)."""
    codes, scales = matrix
    if rows == columns == slice(None):
        return matrix
    blocks = [slice(_block(s.start), _block(s.stop)) for s in (rows, columns)]
    as_bytes = codes.view(torch.uint8)[rows, columns].clone(memory_format=torch.contiguous_format)
    cut = scales[blocks[0], blocks[1]].clone(memory_format=torch.contiguous_format)
    return as_bytes.view(FP8), cut


def _block(place: int | None) -> int | None:
    if place is None:
        return None
    if place % BLOCK:
        raise ValueError(f"{place} lies within a block of {BLOCK} that shares a scale")
    return place // BLOCK


def fp8_experts(
    source: "WeightSource",
    prefix: str,
    names: tuple[str, str, str],
    experts: Sequence[int],
    sizes: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate_up [S, 2F', H'], down [S, H', F'], and the scales of both, in which F and H are padded
    with zeros to multiples of 128. Tensor after tensor goes to its place.

    Args:
        names: of gate, up and down, as in `load_experts`. sizes: (H, F).
    """
    H, F_ = sizes
    wide, tall = padded(H), padded(F_)
    gate_up, down = (_empty(len(experts), *s, device) for s in ((2 * tall, wide), (wide, tall)))
    fused = source.has(f"{prefix}.experts.gate_up_proj")
    first: dict[int, int] = {}
    for slot, expert in enumerate(experts):
        if expert < 0:
            continue
        if expert in first:
            for tensor in (*gate_up, *down):
                tensor[slot] = tensor[first[expert]]
            continue
        first[expert] = slot
        at = f"{prefix}.experts" if fused else f"{prefix}.experts.{expert}"
        if fused:
            gate, up = _halves(source, f"{at}.gate_up_proj", expert, (F_, H))
            _put(gate_up, slot, 0, gate)
            _put(gate_up, slot, tall, up)
            _put(down, slot, 0, source.get_fp8(f"{at}.down_proj", (H, F_), expert))
        else:
            _put(gate_up, slot, 0, source.get_fp8(f"{at}.{names[0]}.weight", (F_, H)))
            _put(gate_up, slot, tall, source.get_fp8(f"{at}.{names[1]}.weight", (F_, H)))
            _put(down, slot, 0, source.get_fp8(f"{at}.{names[2]}.weight", (H, F_)))
    return gate_up[0], down[0], gate_up[1], down[1]


def _empty(slots: int, rows: int, width: int, device: torch.device) -> Matrix:
    codes = torch.zeros(slots, rows, width, dtype=torch.uint8, device=device).view(FP8)
    return codes, torch.zeros(slots, rows // BLOCK, width // BLOCK, device=device)


def _put(to: Matrix, slot: int, row: int, matrix: Matrix) -> None:
    """`matrix` from `row`, a multiple of 128, of a slot on."""
    codes, scales = matrix
    to[0][slot, row : row + len(codes)] = codes
    to[1][slot, row // BLOCK : row // BLOCK + len(scales)] = scales


def _halves(
    source: "WeightSource", name: str, expert: int, shape: tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """Gate and up of a fused tensor, each of `shape`."""
    rows, width = shape
    if rows % BLOCK:
        gate, up = source.get_slice(name, expert, (2 * rows, width)).split(rows)
        return quantise(gate), quantise(up)
    codes, scales = source.get_fp8(name, (2 * rows, width), expert)
    blocks = rows // BLOCK
    return (codes[:rows], scales[:blocks]), (codes[rows:], scales[blocks:])
