"""One step's work: as the scheduler plans it, and as the model sees it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from crossdock.core.request import Request

OverlapMode = Literal["off", "sbo", "tbo"]
"""What is done while rows travel: nothing, the shared expert, or another half of the batch."""


class Scheduled(NamedTuple):
    """One sequence's share of a step: its tokens `start` .. `start + len(tokens)`.

    `pages`: the KV pages of the whole sequence so far, in order. `sample`: whether the last of
    these tokens yields a new one (the prompt is complete). `num_outputs`: tokens generated so far,
    the counter of the random numbers; `output_ids`: these tokens, only where penalties need them.
    A token of -1 is the one that the launched step before is sampling. A tuple: one is made for
    every sequence in every step, and a frozen dataclass takes four times as long.
    """

    request: "Request"
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: bool
    num_outputs: int = 0
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """What one attention group wants to run next: sequences with one token first (decode)."""

    items: tuple[Scheduled, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.tokens) for item in self.items)

    @property
    def num_decodes(self) -> int:
        return sum(1 for item in self.items if len(item.tokens) == 1)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """A plan as tensors. T tokens of B sequences lie one after another; the first `num_decodes`
    sequences have one token each.

    tokens_T, positions_T: int64. kv_slots_T: int64, where each token's KV goes
    (page * page_size + offset). keys_T: int64, a hash of (request, position), for the replica
    choice. query_lens, kv_lens: per sequence, kv_lens counting this step's tokens. page_table_BP:
    int64, rows padded with page 0. sample_rows: int64, the rows whose logits are wanted.
    kv_lens_B: int32, on the device. prefill_starts_B1: int32, where the sequences after the decodes
    begin among their tokens, and the end of the last; None where there are none. most_tokens: of
    any rank in this step, where the ranks agreed on it; of any half of a batch, where this is one.

    A batch that is captured in a CUDA graph has rows_1, int32 on the device: rows from there on are
    empty. Its lengths are known on the device alone (query_lens and kv_lens are empty),
    `num_decodes` is the most there may be, the others' entries follow those of so many, and
    prefill_starts_B1 counts from the first row of all. prefill_keys: the most that the sequences
    after the decodes may see together.
    """

    tokens_T: "Tensor"
    positions_T: "Tensor"
    kv_slots_T: "Tensor"
    keys_T: "Tensor"
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table_BP: "Tensor"
    sample_rows: "Tensor"
    num_decodes: int
    kv_lens_B: "Tensor"
    prefill_starts_B1: "Tensor | None" = None
    most_tokens: int | None = None
    overlap: OverlapMode = "sbo"
    rows_1: "Tensor | None" = None
    prefill_keys: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_T.shape[0])


class GraphSize(NamedTuple):
    """A captured step: of `rows` decodes, or, with `prompts`, of as many tokens of any kind.
    `halves`: whether it can be cut in two."""

    prompts: bool
    rows: int
    halves: bool = True


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """What the host knows of a step before it is replayed, for attention that lays out its work
    there. The sequences as in `ForwardBatch`: query_lens_B, kv_lens_B, int64, decodes first.

    sequences, tokens: the most of any captured step; pages: of a sequence. Where there are prompts,
    their entries follow those of `sequences` decodes.
    """

    size: GraphSize
    num_decodes: int
    query_lens_B: "np.ndarray"
    kv_lens_B: "np.ndarray"
    sequences: int
    tokens: int
    pages: int
    page_size: int
