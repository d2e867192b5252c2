"""From the scheduler's plan to the tensors a model reads."""

from itertools import chain

import torch

from crossdock.core import ForwardBatch, OverlapMode, Plan

# An odd 64-bit constant, so that keys of neighbouring positions lie far apart.
_KEY_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


def make_batch(
    plan: Plan,
    page_size: int,
    device: torch.device,
    most_tokens: int | None = None,
    overlap: OverlapMode = "sbo",
) -> ForwardBatch:
    """`plan.items` as tensors on `device`; a plan of no items gives a batch of no tokens."""
    items = plan.items
    query_lens = [len(item.tokens) for item in items]
    kv_lens = [item.start + len(item.tokens) for item in items]
    tokens_T = torch.tensor([t for item in items for t in item.tokens], dtype=torch.int64)
    positions_T = torch.tensor(
        list(chain.from_iterable(range(i.start, e) for i, e in zip(items, kv_lens, strict=True))),
        dtype=torch.int64,
    )
    width = max((len(item.pages) for item in items), default=1)
    table_BP = torch.tensor(
        [item.pages + (0,) * (width - len(item.pages)) for item in items], dtype=torch.int64
    ).view(len(items), width)
    sequence_T = torch.repeat_interleave(torch.tensor(query_lens, dtype=torch.int64))
    pages_T = table_BP[sequence_T, positions_T // page_size]
    keys_B = torch.tensor([_signed(item.request.key) for item in items], dtype=torch.int64)
    ends = torch.tensor(query_lens, dtype=torch.int64).cumsum(0) - 1
    samples = torch.tensor([i for i, item in enumerate(items) if item.sample], dtype=torch.int64)
    return ForwardBatch(
        tokens_T=tokens_T.to(device),
        positions_T=positions_T.to(device),
        kv_slots_T=(pages_T * page_size + positions_T % page_size).to(device),
        keys_T=(keys_B[sequence_T] + positions_T * _KEY_MULTIPLIER).to(device),
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        page_table_BP=table_BP.to(device),
        sample_rows=ends[samples].to(device),
        num_decodes=plan.num_decodes,
        most_tokens=most_tokens,
        overlap=overlap,
    )


def _signed(key: int) -> int:
    """A 64-bit key as the signed integer that a tensor holds."""
    key &= 2**64 - 1
    return key - 2**64 if key >= 2**63 else key
