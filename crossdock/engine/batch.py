"""From the scheduler's plan to the tensors a model reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from crossdock.core import ForwardBatch, OverlapMode, Plan
from crossdock.engine.transfer import to_device

# An odd 64-bit constant, so that keys of neighbouring positions lie far apart.
_KEY_MULTIPLIER = np.int64(0x9E3779B97F4A7C15 - 2**64)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens that the launched step before draws: ids_B int64 on the device, and the row of each
    request. A token of -1 in a plan is one of them."""

    ids_B: Tensor
    rows: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A plan as arrays, as `ForwardBatch` describes them. drawn_T: where a token is -1, its row
    among those drawn."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    kv_slots_T: np.ndarray
    keys_T: np.ndarray
    query_lens_B: np.ndarray
    kv_lens_B: np.ndarray
    page_table_BP: np.ndarray
    sample_rows: np.ndarray
    drawn_T: np.ndarray | None


def lay_out(plan: Plan, page_size: int, rows: Mapping[str, int] | None = None) -> HostBatch:
    """`rows`: of `Drawn`; needed where a token is -1."""
    items = plan.items
    counts = [len(item.tokens) for item in items]
    query_lens_B = np.array(counts, dtype=np.int64)
    starts_B = np.array([item.start for item in items], dtype=np.int64)
    total = sum(counts)
    flat = chain.from_iterable(item.tokens for item in items)
    tokens_T = np.fromiter(flat, dtype=np.int64, count=total)
    ends_B = query_lens_B.cumsum()
    sequence_T = np.repeat(np.arange(len(items)), query_lens_B)
    offset_T = np.arange(total) - np.repeat(ends_B - query_lens_B, query_lens_B)
    positions_T = starts_B[sequence_T] + offset_T
    table_BP = _page_table([item.pages for item in items])
    pages_T = table_BP[sequence_T, positions_T // page_size]
    keys_B = np.array([item.request.key & _ALL for item in items], dtype=np.uint64).view(np.int64)
    drawn_T = None
    if total and tokens_T.min() < 0:
        assert rows is not None
        drawn_T = np.zeros(total, dtype=np.int64)
        for i in np.flatnonzero(tokens_T < 0):
            drawn_T[i] = rows[items[sequence_T[i]].request.id]
    samples = np.array([item.sample for item in items], dtype=bool)
    return HostBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        kv_slots_T=pages_T * page_size + positions_T % page_size,
        keys_T=keys_B[sequence_T] + positions_T * _KEY_MULTIPLIER,
        query_lens_B=query_lens_B,
        kv_lens_B=starts_B + query_lens_B,
        page_table_BP=table_BP,
        sample_rows=ends_B[samples] - 1,
        drawn_T=drawn_T,
    )


_ALL = 2**64 - 1


def _page_table(pages: list[tuple[int, ...]]) -> np.ndarray:
    width = max(map(len, pages), default=1)
    table_BP = np.zeros((len(pages), width), dtype=np.int64)
    for row, those in zip(table_BP, pages, strict=True):
        row[: len(those)] = those
    return table_BP


def make_batch(
    plan: Plan,
    page_size: int,
    device: torch.device,
    most_tokens: int | None = None,
    overlap: OverlapMode = "sbo",
    drawn: Drawn | None = None,
) -> ForwardBatch:
    """`plan.items` as tensors on `device`; a plan of no items gives a batch of no tokens."""
    host = lay_out(plan, page_size, None if drawn is None else drawn.rows)
    n = plan.num_decodes
    arrays = [host.tokens_T, host.positions_T, host.kv_slots_T, host.keys_T, host.page_table_BP]
    starts_B1 = np.concatenate(([0], host.query_lens_B[n:].cumsum())).astype(np.int32)
    arrays += [host.sample_rows, host.kv_lens_B.astype(np.int32), starts_B1]
    if host.drawn_T is not None:
        arrays.append(host.drawn_T)
    tokens_T, positions_T, slots_T, keys_T, table_BP, samples, lens_B, starts_B, *rest = to_device(
        arrays, device
    )
    if rest:
        assert drawn is not None
        tokens_T = torch.where(tokens_T < 0, drawn.ids_B[rest[0]], tokens_T)
    return ForwardBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        kv_slots_T=slots_T,
        keys_T=keys_T,
        query_lens=tuple(host.query_lens_B.tolist()),
        kv_lens=tuple(host.kv_lens_B.tolist()),
        page_table_BP=table_BP,
        sample_rows=samples,
        num_decodes=n,
        kv_lens_B=lens_B,
        prefill_starts_B1=starts_B if n < len(plan.items) else None,
        most_tokens=most_tokens,
        overlap=overlap,
    )
