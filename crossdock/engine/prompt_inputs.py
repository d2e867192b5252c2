"""The inputs of captured steps with prompts: where they lie, and what is put there."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crossdock.core import ForwardBatch, OverlapMode
from crossdock.engine.batch import Drawn, HostBatch
from crossdock.engine.transfer import to_device

KeyCopies = Literal["none", "expanded", "gathered"]
"""What attention makes of the keys of prompts first: MLA expands them; GQA gathers those of an FP8
cache. Captured, it has room for only so many."""

_SPARE = 16
_GATHERED = 4


def keys_of(tokens: int) -> int:
    """Keys that the prompts of a captured step of so many tokens may see together: theirs, and some
    of earlier chunks. MLA expands as many in every step."""
    return tokens + tokens // 4


def gathered_keys(most_tokens: int) -> int:
    """As `keys_of` where keys are gathered, for all sizes up to `most_tokens`: room that is not
    used takes memory alone."""
    return _GATHERED * most_tokens


def tokens_for(keys: int) -> int:
    """The smallest step that has room for so many keys."""
    return -(-keys * 4 // 5)


def half_rows(rows: int) -> int:
    """Of a half of a captured step: a cut keeps clear of single tokens."""
    return rows // 2 + _SPARE


class PromptInputs:
    """Of steps of B to T tokens in up to B sequences of P pages, decodes first; the same buffers
    for every size. Entries of sequences: of B decodes, then of B prompts."""

    def __init__(self, sequences: int, tokens: int, pages: int, device: torch.device):
        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.sequences, self.device = sequences, device
        self.tokens_T, self.positions_T = make(tokens), make(tokens)
        self.slots_T, self.keys_T = make(tokens).fill_(-1), make(tokens)
        self.lens_B = make(2 * sequences, dtype=torch.int32)
        self.table_BP = make(2 * sequences, pages)
        self.starts_B1 = make(sequences + 1, dtype=torch.int32)
        self.samples_B = make(sequences)
        self.rows_1 = make(1, dtype=torch.int32)

    def load(self, host: HostBatch, decodes: int, size: int, drawn: Drawn | None) -> None:
        B, n, T = self.sequences, len(host.kv_lens_B), len(host.tokens_T)
        lens_B = np.zeros(2 * B, dtype=np.int32)
        lens_B[:decodes] = host.kv_lens_B[:decodes]
        lens_B[B : B + n - decodes] = host.kv_lens_B[decodes:]
        starts_B1 = np.full(B + 1, T, dtype=np.int32)
        starts_B1[0] = decodes
        starts_B1[1 : n - decodes + 1] = decodes + host.query_lens_B[decodes:].cumsum()
        samples_B = np.zeros(B, dtype=np.int64)
        samples_B[: len(host.sample_rows)] = host.sample_rows
        rows_1 = np.array([T], dtype=np.int32)
        arrays = [_filled(host.tokens_T, size, 0), _filled(host.positions_T, size, 0)]
        arrays += [_filled(host.kv_slots_T, size, -1), _filled(host.keys_T, size, 0)]
        arrays += [lens_B, starts_B1, samples_B, rows_1, host.page_table_BP]
        tokens_T, *there, table_BP = to_device(arrays, self.device)
        if host.drawn_T is not None:
            assert drawn is not None
            (rows_T,) = to_device([_filled(host.drawn_T, size, 0)], self.device)
            tokens_T = torch.where(tokens_T < 0, drawn.ids_B[rows_T], tokens_T)
        to = [self.tokens_T[:size], self.positions_T[:size], self.slots_T[:size]]
        to += [self.keys_T[:size], self.lens_B, self.starts_B1, self.samples_B, self.rows_1]
        for target, value in zip(to, (tokens_T, *there), strict=True):
            target.copy_(value)
        width = table_BP.shape[1]
        self.table_BP[:decodes, :width] = table_BP[:decodes]
        self.table_BP[B : B + n - decodes, :width] = table_BP[decodes:]

    def batch(self, size: int, overlap: OverlapMode, keys: int) -> ForwardBatch:
        """As a captured forward of `size` tokens reads it, whose prompts see up to `keys` keys."""
        return ForwardBatch(
            tokens_T=self.tokens_T[:size],
            positions_T=self.positions_T[:size],
            kv_slots_T=self.slots_T[:size],
            keys_T=self.keys_T[:size],
            query_lens=(),
            kv_lens=(),
            page_table_BP=self.table_BP,
            sample_rows=self.samples_B,
            num_decodes=self.sequences,
            kv_lens_B=self.lens_B,
            prefill_starts_B1=self.starts_B1,
            most_tokens=size,
            overlap=overlap,
            rows_1=self.rows_1,
            prefill_keys=keys,
        )


def _filled(array: np.ndarray, size: int, value: int) -> np.ndarray:
    out = np.full(size, value, dtype=array.dtype)
    out[: len(array)] = array
    return out
