"""Weights in FP8 with a scale per 128x128 block, and the product with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.core.staging import SCALE_BLOCK as BLOCK


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """[O, I], one or more matrices one after another; value = code * scale of its block.

    codes: E4M3 [O', I'], zeros where padded: I to a multiple of 128, and each matrix but the last
    to one of 128 rows, so that none shares a block of scales with its neighbour. scales: fp32
    [ceil(O' / 128), I' / 128]. spans: (first, end) of the rows of codes that count, in order;
    neighbours without a gap are one span.
    """

    codes: Tensor
    scales: Tensor
    spans: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def join_fp8(parts: Sequence[tuple[Tensor, Tensor]]) -> Fp8Weight:
    """Of (codes [O, I'], scales [ceil(O / 128), I' / 128]) of the same width. Example, DeepSeek-V3:
    1,536 rows of q_a and 576 of kv_a, 4.5 blocks, are 2,112 rows in 12 + 5 blocks, one span; 192
    rows and 128 are 192 + 64 of padding + 128, two spans."""
    if len(parts) == 1:
        codes, scales = parts[0]
        return Fp8Weight(codes, scales, ((0, len(codes)),))
    codes_of: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    first = 0
    for i, (codes, _) in enumerate(parts):
        end = first + len(codes)
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
        padding = 0 if i == len(parts) - 1 else -len(codes) % BLOCK
        # As bytes, for which every operation is there on every device; a zero is a zero byte.
        codes_of.append(F.pad(codes.view(torch.uint8), (0, 0, 0, padding)))
        first = end + padding
    joined = torch.cat(codes_of).view(parts[0][0].dtype)
    return Fp8Weight(joined, torch.cat([scales for _, scales in parts]), tuple(spans))


def fp8_linear(x_TK: Tensor, w_NK: Any, b_N: Tensor | None = None) -> Tensor:
    """As `linear`, where `w_NK` is an `Fp8Weight` or a tensor. Of the former the activations are
    quantised per token and 128 channels, and the output is BF16."""
    if isinstance(w_NK, Tensor):
        return F.linear(x_TK, w_NK, b_N)
    from crossdock.kernels.linear_fp8 import linear_fp8  # imports triton

    y_TN = linear_fp8(x_TK, w_NK.codes, w_NK.scales)
    if len(w_NK.spans) > 1:
        y_TN = torch.cat([y_TN[:, first:end] for first, end in w_NK.spans], dim=1)
    return y_TN if b_N is None else y_TN + b_N
