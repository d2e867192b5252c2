# mypy: disable-error-code="no-untyped-def"
"""A checksum in one pass over the bytes, beside running steps: few programs, a part for each. The
sum of the 16-bit words, and their sum weighted by position (after Fletcher, 1982)."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MODULUS = 65521
_BLOCK, _PROGRAMS = 4096, 64


@triton.jit(do_not_specialize=["start", "words"])
def _checksum_kernel(
    data_ptr, out_ptr, start, words, MODULUS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.int64)
    first = tl.program_id(0) * BLOCK
    while first < words:
        at = first + tl.arange(0, BLOCK)
        word = tl.load(data_ptr + at, mask=at < words, other=0).to(tl.int64)
        total += word
        weighted += word * ((start + at) % MODULUS + 1)
        first += tl.num_programs(0) * BLOCK
    tl.atomic_add(out_ptr, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(out_ptr + 1, tl.sum(weighted, axis=0), sem="relaxed")


def checksum(pieces: Sequence[Tensor]) -> Tensor:
    """int64 [2] of contiguous uint8 `pieces` of even lengths, one after another; the boundaries of
    pieces do not matter."""
    out = torch.zeros(2, dtype=torch.int64, device=pieces[0].device)
    start = 0
    for data in pieces:
        words = data.numel() // 2
        if words:
            programs = min(_PROGRAMS, triton.cdiv(words, _BLOCK))
            _checksum_kernel[(programs,)](
                data.view(torch.int16), out, start, words, MODULUS=MODULUS, BLOCK=_BLOCK,
                num_warps=8,
            )  # fmt: skip
        start += words
    return out


def checksum_twin(pieces: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(2, dtype=torch.int64, device=pieces[0].device)
    start = 0
    for data in pieces:
        words = data.view(torch.int16).long()
        at = torch.arange(start, start + words.numel(), device=data.device)
        total += torch.stack((words.sum(), (words * (at % MODULUS + 1)).sum()))
        start += words.numel()
    return total
