"""Attention of invariant mode: each row by itself, key blocks in order, online softmax in float32
(FlashAttention, arXiv 2205.14135, section 3.1); in torch, and by a kernel of fixed tiles on GPUs.

Blocks lie at fixed positions of the sequence and every product has a fixed shape per row, so
neither chunks, nor other rows, nor the page size change a bit; a block that a row cannot see leaves
its sums exactly as they were.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from crossdock.layers.attention.plan import KEY_BLOCK, FixedRows, KeyBlock
from crossdock.layers.linear import pad_width

ReadBlock = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots [T * KEY_BLOCK] to float32 keys [T * G, KEY_BLOCK, D] and values [T * G, KEY_BLOCK, V]."""


def blockwise_attention(
    q_TGMD: Tensor, blocks: tuple[KeyBlock, ...], read: ReadBlock, scale: float
) -> Tensor:
    """float32 [T, G, M, V] for G groups of M heads that share their keys."""
    T, G, M, _ = q_TGMD.shape
    q = pad_width(q_TGMD.float()).reshape(T * G, M, -1)
    # Finite, so that a row whose window starts in a later block meets no inf - inf.
    best = q.new_full((T * G, M, 1), -1e30)
    total, out = torch.zeros_like(best), None
    for block in blocks:
        k, v = read(block.slots)
        scores = torch.bmm(q, pad_width(k).transpose(1, 2)).mul_(scale).view(T, G, M, KEY_BLOCK)
        scores = scores.add_(block.bias_TN[:, None, None]).view(T * G, M, KEY_BLOCK)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(higher).exp_()
        shrink = best.sub_(higher).exp_()
        total = total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        seen = torch.bmm(weights, pad_width(v))
        out = seen if out is None else out.mul_(shrink).add_(seen)
        best = higher
    assert out is not None  # a row sees at least itself
    return out.div_(total).view(T, G, M, -1)[..., : v.shape[-1]]


def fixed_attention(
    q_ThD: Tensor,
    cache: tuple[Tensor, ...],
    rows: FixedRows,
    scale: float,
    latent: int | None = None,
) -> Tensor:
    """As `kernels.attention_invariant`."""
    from crossdock.kernels.attention_invariant import attention_invariant  # imports triton

    return attention_invariant(
        q_ThD, cache, rows.tiles_W3, rows.positions_T, rows.table_BP, scale, rows.page_size, latent,
        rows.window,
    )  # fmt: skip
