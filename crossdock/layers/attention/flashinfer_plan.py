"""The host's part of FlashInfer's kernels (arXiv 2501.01005, section 3.3): its scheduler lays a
step's work out on the host and copies it to the device, where the kernels find it.

Steps in CUDA graphs are laid out right before they are replayed. What the layout gives a kernel
beside that copy, offsets and its grid, follows from the most rows and sequences, and so is the
graph's for good. Pages are read from a table at a fixed address: a sequence's entries are where its
row of the table is, so the library's `indptr` of pages counts whole rows.

Halves of a step stay on Triton's kernels: the MLA kernel is one cooperative grid on all
multiprocessors, which waits for itself and would wait forever beside an exchange that does too; the
prefill kernel keeps its multiprocessors to the end, and an exchange waits for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdock.core import ForwardBatch, GQASpec, MLASpec
from crossdock.core.batch import CapturedStep
from crossdock.layers.attention.flashinfer_library import AttentionCase
from crossdock.layers.attention.paged_plan import Decodes, PagedPlanner, Prompts
from crossdock.layers.rope import Rope

_PARTIAL_BYTES = 32 << 20
"""Of partial sums: the MLA kernel keeps 128 rows of 512 values twice for every two multiprocessors;
the prefill kernel keeps none."""


@dataclass(frozen=True, eq=False)
class FlashDecodes(Decodes):
    """run: (q [B, h, L], q [B, h, R], latents [pages, page, L], keys [pages, page, R]) to
    [B, h, L]."""

    run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FlashPrompts(Prompts):
    """run: (q [T, h, D], (k, v), each [pages, page, g, D], out=[T, h, D]); rows of no sequence are
    not written."""

    run: Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Layout:
    """int32: where sequences begin among the rows and in the table of pages, and their keys."""

    rows_B1: np.ndarray
    entries_B1: np.ndarray
    keys_B: np.ndarray


def lay_out(
    query_lens: Sequence[int] | np.ndarray,
    kv_lens: Sequence[int] | np.ndarray,
    width: int,
    first: int = 0,
    sequences: int | None = None,
) -> Layout:
    """Sequences one after another from row `first` on, in a table of `width` pages a row; filled up
    with empty ones to `sequences`."""
    n = len(query_lens)
    count = n if sequences is None else sequences
    rows_B1 = np.full(count + 1, first + int(np.sum(query_lens)), dtype=np.int32)
    rows_B1[0] = first
    rows_B1[1 : n + 1] = first + np.cumsum(query_lens)
    keys_B = np.zeros(count, dtype=np.int32)
    keys_B[:n] = kv_lens
    return Layout(rows_B1, np.arange(count + 1, dtype=np.int32) * width, keys_B)


@torch.inference_mode(False)  # they are written to in and out of it
def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


class Staged:
    """A wrapper of the library. It lays out in one pinned buffer that is read when the device comes
    to the copy, so the next layout waits until that was."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device, make: Callable[..., Any], *args: Any, **settings: Any):
        self._wrapper = make(*args, backend="fa3", **settings)
        self.run: Callable[..., Tensor] = self._wrapper.run
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, *args: Any, **settings: Any) -> None:
        """Arrays become tensors that are copied without holding the host up."""
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            *(self._on_host(x) for x in args),
            **{name: self._on_host(x) for name, x in settings.items()},
        )
        if self._copied is not None:
            self._copied.record()

    def _on_host(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(value)
        return tensor if self._copied is None else tensor.pin_memory()


class FlashPrefill:
    """Of prompts, over pages (FlashAttention-3, arXiv 2407.08608)."""

    def __init__(self, library: Any, case: AttentionCase, device: torch.device, dtype: torch.dtype):
        assert isinstance(case.spec, GQASpec)
        s, self._library, self._device = case.spec, library, device
        self._heads = s.num_heads, s.num_kv_heads, s.head_dim
        self._settings: dict[str, Any] = {"causal": True, "sm_scale": case.scale}
        self._settings |= {"q_data_type": dtype, "kv_data_type": dtype}
        self._partial = torch.empty(1 << 10, dtype=torch.uint8, device=device)
        self._eager: Staged | None = None
        self._captured: tuple[Staged, Tensor] | None = None

    def now(self, batch: ForwardBatch, page_size: int) -> Callable[..., Tensor]:
        """Of a batch that runs eagerly."""
        if self._eager is None:
            self._eager = self._wrap()
        n = batch.num_decodes
        table_BP = batch.page_table_BP[n:].int()
        layout = lay_out(batch.query_lens[n:], batch.kv_lens[n:], table_BP.shape[1])
        self._plan(self._eager, layout, table_BP.flatten(), page_size)
        return self._eager.run

    def lay_out(self, step: CapturedStep) -> None:
        if not step.size.prompts:
            return
        n, most = step.num_decodes, step.sequences
        if self._captured is None:
            self._captured = self._capturable(step)
        staged, table_BP = self._captured
        lens = step.query_lens_B[n:], step.kv_lens_B[n:]
        layout = lay_out(*lens, step.pages, first=n, sequences=most)
        self._plan(staged, layout, table_BP.view(-1)[:0], step.page_size)

    def captured(self, batch: ForwardBatch) -> Callable[..., Tensor]:
        assert self._captured is not None
        staged, table_BP = self._captured
        table_BP.copy_(batch.page_table_BP[batch.num_decodes :])
        return staged.run

    def _capturable(self, step: CapturedStep) -> tuple[Staged, Tensor]:
        """The first layout is the one with the most rows: it sets the offsets of all others."""
        B, device = step.sequences, self._device
        table_BP = _zeros(B, step.pages, device=device)
        staged = self._wrap(
            use_cuda_graph=True,
            qo_indptr_buf=_zeros(B + 1, device=device),
            paged_kv_indptr_buf=_zeros(B + 1, device=device),
            paged_kv_indices_buf=table_BP.view(-1),
            paged_kv_last_page_len_buf=_zeros(B, device=device),
        )
        layout = lay_out([step.tokens], [step.tokens], step.pages, sequences=B)
        self._plan(staged, layout, table_BP.view(-1)[:0], step.page_size)
        return staged, table_BP

    def _wrap(self, **buffers: Any) -> Staged:
        make = self._library.BatchPrefillWithPagedKVCacheWrapper
        return Staged(self._device, make, self._partial, "NHD", **buffers)

    def _plan(self, staged: Staged, layout: Layout, entries_N: Tensor, page_size: int) -> None:
        last_B = (layout.keys_B - 1) % page_size + 1
        staged.plan(
            layout.rows_B1, layout.entries_B1, entries_N, last_B, *self._heads, page_size,
            seq_lens=layout.keys_B, **self._settings,
        )  # fmt: skip


class FlashLatent:
    """Of decodes of MLA, absorbed (FlashMLA's scheme). Its offsets and grid are alike for all
    batches in which every sequence has one row, so one wrapper serves all steps."""

    def __init__(self, library: Any, case: AttentionCase, device: torch.device, dtype: torch.dtype):
        assert isinstance(case.spec, MLASpec)
        s = case.spec
        self._dims, self._types = (s.num_heads, s.kv_lora_rank, s.qk_rope_head_dim), (dtype, dtype)
        self._scale, self._device = case.scale, device
        partial = torch.empty(_PARTIAL_BYTES, dtype=torch.uint8, device=device)
        self._staged = Staged(device, library.BatchMLAPagedAttentionWrapper, partial)
        self._table_BP: Tensor | None = None

    def now(self, batch: ForwardBatch, page_size: int) -> Callable[..., Tensor]:
        """Of a batch that runs eagerly."""
        n = batch.num_decodes
        table_BP = batch.page_table_BP[:n].int()
        self._plan(batch.kv_lens[:n], n, table_BP, page_size)
        return self._staged.run

    def lay_out(self, step: CapturedStep) -> None:
        rows = step.sequences if step.size.prompts else step.size.rows
        if self._table_BP is None:
            self._table_BP = _zeros(step.sequences, step.pages, device=self._device)
        lens_B = step.kv_lens_B[: step.num_decodes]
        self._plan(lens_B, rows, self._table_BP, step.page_size)

    def captured(self, batch: ForwardBatch) -> Callable[..., Tensor]:
        assert self._table_BP is not None
        n = batch.num_decodes
        self._table_BP[:n].copy_(batch.page_table_BP[:n])
        return self._staged.run

    def _plan(
        self, kv_lens: Sequence[int] | np.ndarray, rows: int, table_BP: Tensor, page_size: int
    ) -> None:
        """Empty rows have no keys; without a row the library would take another grid."""
        keys_B = np.zeros(rows, dtype=np.int32)
        keys_B[: len(kv_lens)] = kv_lens
        layout = lay_out([1] * rows, keys_B, table_BP.shape[1])
        self._staged.plan(
            layout.rows_B1, layout.entries_B1, table_BP.view(-1), layout.keys_B, *self._dims,
            page_size, False, self._scale, *self._types,
        )  # fmt: skip


class FlashInferPlanner(PagedPlanner):
    """Decodes of MLA and prompts of GQA to the library, the others to Triton's kernels."""

    def __init__(
        self,
        library: Any,
        case: AttentionCase,
        rope: Rope,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(case.spec, rope, device, case.fp8_cache)
        served = FlashLatent if self.mla else FlashPrefill
        self._served: FlashLatent | FlashPrefill = served(library, case, device, dtype)

    def lay_out(self, step: CapturedStep) -> None:
        """Of a whole step, before it is captured or replayed."""
        self._served.lay_out(step)

    def _decode(self, batch: ForwardBatch, page_size: int) -> Decodes:
        if not isinstance(self._served, FlashLatent) or batch.overlap == "tbo":
            return super()._decode(batch, page_size)
        n = batch.num_decodes
        return FlashDecodes(n, batch.kv_lens_B[:n], self._run(batch, page_size))

    def _prefill(self, batch: ForwardBatch, page_size: int) -> Prompts:
        if not isinstance(self._served, FlashPrefill) or batch.overlap == "tbo":
            return super()._prefill(batch, page_size)
        start = 0 if batch.rows_1 is not None else batch.num_decodes
        return FlashPrompts(start, self._run(batch, page_size))

    def _run(self, batch: ForwardBatch, page_size: int) -> Callable[..., Tensor]:
        if batch.rows_1 is not None:
            return self._served.captured(batch)
        return self._served.now(batch, page_size)
