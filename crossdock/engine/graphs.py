"""Steps in CUDA graphs: forward pass and logits, communication included, for a ladder of sizes. A
rank replays the size on which all agreed, and its rows beyond its own are empty: they see no key,
write no KV, and go to no expert.

Decodes have graphs of their own. The others take tokens of any kind, decodes first; without them
the host would launch a step of prompts more slowly than a GPU runs it. What a graph reads and
writes keeps its address: the inputs here, weights, cache, the maps from logical to physical
experts, peer pointers and the epochs of exchanges. So a change of placement needs no new capture.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdock.core import KV, ForwardBatch, Model, OverlapMode, Plan
from crossdock.core.batch import CapturedStep, GraphSize
from crossdock.engine.batch import Drawn, HostBatch, lay_out
from crossdock.engine.drive import drive, drive_both
from crossdock.engine.overlap import even_cut, halve
from crossdock.engine.prompt_inputs import (
    KeyCopies,
    PromptInputs,
    gathered_keys,
    half_rows,
    keys_of,
    tokens_for,
)
from crossdock.engine.transfer import to_device
from crossdock.kernels.decode_inputs import DecodeInputs, load_decodes
from crossdock.metrics import Recorder, StepTiming

_FEW = (1, 2, 4, 8, 16)
_STEPS = ((32, 128), (64, 512), (128, 1 << 30))
"""(rows between two sizes, up to so many rows)."""
_LEAST_TOKENS = 256
"""Of the smallest step with prompts; sizes are powers of two times the largest, and 3/4 of them."""


def decode_sizes(most: int) -> tuple[int, ...]:
    """Rows up to `most`, itself the last: a batch replays the next larger one."""
    sizes = [size for size in _FEW if size < most]
    size = 32
    while size < most:
        sizes.append(size)
        size += next(step for step, end in _STEPS if size < end)
    return (*sizes, most)


def prompt_sizes(least: int, most: int) -> tuple[int, ...]:
    """Tokens from `least` or a little more up to `most`, itself the last."""
    sizes, size, least = [most], most, max(least, _LEAST_TOKENS)
    while size // 2 >= least:
        sizes += [size - size // 4, size // 2]
        size //= 2
    return tuple(reversed(sizes))


@dataclass(frozen=True, eq=False)
class _Graph:
    """`timing`: of one with events inside."""

    graph: torch.cuda.CUDAGraph
    timing: StepTiming | None


class StepGraphs:
    """All ranks capture and replay the same graphs in the same order, since exchanges inside wait
    for those of the others.

    Args:
        max_num_seqs, max_num_batched_tokens: of a step.
        max_model_len: tokens of the longest sequence.
        copies: of the keys of prompts.
        vocab_size: of the logits.
    """

    def __init__(
        self,
        model: Model,
        kv: KV,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        copies: KeyCopies,
        device: torch.device,
        recorder: Recorder,
    ):
        self.model, self.kv, self.device, self._recorder = model, kv, device, recorder
        self._copies = copies
        sequences = min(max_num_seqs, max_num_batched_tokens)
        self.decode_sizes = decode_sizes(sequences)
        self.prompt_sizes = prompt_sizes(sequences, max_num_batched_tokens)
        self.pages = pages = -(-max_model_len // kv.page_size)
        self.decodes = DecodeInputs.empty(sequences, pages, device)
        self.prompts = PromptInputs(sequences, max_num_batched_tokens, pages, device)
        most = half_rows(max_num_batched_tokens)
        self.halves = [PromptInputs(sequences, most, pages, device) for _ in range(2)]
        self.pick_B = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.logits_BV = torch.zeros(sequences, vocab_size, device=device)
        self._graphs: dict[tuple[GraphSize, OverlapMode, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def describe(self) -> str:
        decodes, prompts = self.decode_sizes, self.prompt_sizes
        return (
            f"{len(decodes)} sizes of decodes up to {decodes[-1]}, {len(prompts)} of steps with "
            f"prompts up to {prompts[-1]} tokens"
        )

    def need(self, plan: Plan) -> int:
        """Tokens that a graph for this rank's prompts must be made for; 0 without prompts."""
        if plan.num_decodes == len(plan.items):
            return 0
        if self._copies == "none":
            return plan.num_tokens
        keys = sum(i.start + len(i.tokens) for i in plan.items[plan.num_decodes :])
        if self._copies == "expanded":
            return max(plan.num_tokens, tokens_for(keys))
        most = self.prompt_sizes[-1]
        return plan.num_tokens if keys <= gathered_keys(most) else most + 1  # than any graph takes

    def _keys(self, rows: int) -> int:
        """That the prompts of a captured step may see together."""
        return gathered_keys(self.prompt_sizes[-1]) if self._copies == "gathered" else keys_of(rows)

    def fit(self, need: int, tokens: int) -> GraphSize | None:
        """For the most that any rank needs and the tokens of the rank that has most; None: no graph
        takes them."""
        sizes = self.prompt_sizes if need else self.decode_sizes
        rows = next((size for size in sizes if size >= max(need, tokens)), None)
        return None if rows is None else self._size(need > 0, rows)

    def _size(self, prompts: bool, rows: int) -> GraphSize:
        least = self.prompts.sequences if prompts else 1
        return GraphSize(prompts, rows, (half_rows(rows) if prompts else rows // 2) >= least)

    def capture_all(self, mode_of: Callable[[GraphSize], OverlapMode | None]) -> None:
        """Every size in its overlap mode (None: in no graph), plain and timed; forgets others.
        Collective."""
        sizes = [self._size(True, rows) for rows in reversed(self.prompt_sizes)]
        sizes += [self._size(False, rows) for rows in reversed(self.decode_sizes)]
        modes = [(size, mode_of(size)) for size in sizes]
        wanted = [(size, mode) for size, mode in modes if mode is not None]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[:2] in wanted}
        for size, mode in wanted:  # the largest first: the others fit into its memory
            for timed in (False, True):
                self.capture(size, mode, timed)

    def capture(self, size: GraphSize, overlap: OverlapMode, timed: bool = False) -> None:
        """Collective. Nothing where it is captured already."""
        if (size, overlap, timed) in self._graphs:
            return
        self._load(Plan(()), size, overlap, None)
        if (size, overlap, not timed) not in self._graphs:
            self._step(size, overlap)  # compiles, and takes what memory it needs beside the graph
            torch.cuda.synchronize(self.device)
        timing = StepTiming(self._recorder, external=True) if timed else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            if timing is None:
                self._step(size, overlap)
            else:
                with timing.recording():
                    self._step(size, overlap)
        self._graphs[size, overlap, timed] = _Graph(graph, timing)

    def timing(self, size: GraphSize, overlap: OverlapMode) -> StepTiming:
        """Of the graph with events inside."""
        timing = self._graphs[size, overlap, True].timing
        assert timing is not None
        return timing

    def replay(
        self,
        plan: Plan,
        size: GraphSize,
        overlap: OverlapMode,
        drawn: Drawn | None = None,
        timed: bool = False,
    ) -> Tensor:
        """Logits [B, V] of the items of `plan` that sample, valid until the next replay."""
        self._load(plan, size, overlap, drawn)
        self._graphs[size, overlap, timed].graph.replay()
        rows = [i for i, item in enumerate(plan.items) if item.sample]
        if size.prompts or len(rows) == len(plan.items):
            return self.logits_BV[: len(rows)]
        (rows_B,) = to_device([np.array(rows, dtype=np.int64)], self.device)
        return self.logits_BV[rows_B]

    def _load(self, plan: Plan, size: GraphSize, overlap: OverlapMode, drawn: Drawn | None) -> None:
        if size.prompts and overlap == "tbo":
            self._load_halves(plan, size, drawn)
            return
        host = self._lay_out(plan, drawn)
        if overlap != "tbo":
            self.model.lay_out(self._captured(plan, size, host))
        if size.prompts:
            self.prompts.load(host, plan.num_decodes, size.rows, drawn)
            return
        arrays = [host.tokens_T, host.positions_T, host.kv_slots_T, host.keys_T]
        arrays += [host.kv_lens_B.astype(np.int32), host.page_table_BP]
        if host.drawn_T is not None:
            arrays.append(host.drawn_T)
        tokens, positions, slots, keys, lens, table, *rest = to_device(arrays, self.device)
        ids = tokens if drawn is None else drawn.ids_B
        load_decodes(
            self.decodes, size.rows, tokens, positions, slots, keys, lens, table,
            rest[0] if rest else None, ids,
        )  # fmt: skip

    def _load_halves(self, plan: Plan, size: GraphSize, drawn: Drawn | None) -> None:
        B = self.prompts.sequences
        cut = even_cut([len(item.tokens) for item in plan.items])
        picked = []
        for i, half in enumerate(halve(plan, cut, self.kv.page_size)):
            host = self._lay_out(half, drawn)
            self.halves[i].load(host, half.num_decodes, half_rows(size.rows), drawn)
            picked.append(np.arange(len(host.sample_rows)) + i * B)
        pick_B = np.zeros(B, dtype=np.int64)
        pick_B[: sum(map(len, picked))] = np.concatenate(picked)
        self.pick_B.copy_(to_device([pick_B], self.device)[0])

    def _captured(self, plan: Plan, size: GraphSize, host: HostBatch) -> CapturedStep:
        return CapturedStep(
            size,
            plan.num_decodes,
            host.query_lens_B,
            host.kv_lens_B,
            self.prompts.sequences,
            self.prompt_sizes[-1],
            self.pages,
            self.kv.page_size,
        )

    def _lay_out(self, plan: Plan, drawn: Drawn | None) -> HostBatch:
        return lay_out(plan, self.kv.page_size, None if drawn is None else drawn.rows)

    def _step(self, size: GraphSize, overlap: OverlapMode) -> None:
        hidden_BH = self._hidden(size, overlap)
        with self._recorder.span("sample"):
            # A result of the graph's own would take as much memory for every size.
            self.model.logits(hidden_BH, self.logits_BV[: len(hidden_BH)])

    def _hidden(self, size: GraphSize, overlap: OverlapMode) -> Tensor:
        rows, forward = size.rows, self.model.forward
        if size.prompts and overlap == "tbo":
            halves = [h.batch(half_rows(rows), "tbo", self._keys(rows)) for h in self.halves]
            hidden = drive_both(*(forward(half, self.kv) for half in halves))
            sampled = [h[half.sample_rows] for h, half in zip(hidden, halves, strict=True)]
            return torch.cat(sampled)[self.pick_B]
        if size.prompts:
            batch = self.prompts.batch(rows, overlap, self._keys(rows))
            return drive(forward(batch, self.kv))[batch.sample_rows]
        if overlap != "tbo":
            return drive(self._decode(slice(0, rows), 0, rows, overlap))
        half = rows // 2
        first = self._decode(slice(0, half), 1, rows - half, "tbo")
        second = self._decode(slice(half, rows), 2, rows - half, "tbo")
        return torch.cat(drive_both(first, second))

    def _decode(
        self, rows: slice, part: int, most: int, overlap: OverlapMode
    ) -> Generator[None, None, Tensor]:
        to = self.decodes
        batch = ForwardBatch(
            tokens_T=to.tokens_B[rows],
            positions_T=to.positions_B[rows],
            kv_slots_T=to.slots_B[rows],
            keys_T=to.keys_B[rows],
            query_lens=(),
            kv_lens=(),
            page_table_BP=to.table_BP[rows],
            sample_rows=to.tokens_B[:0],
            num_decodes=rows.stop - rows.start,
            kv_lens_B=to.lens_B[rows],
            most_tokens=most,
            overlap=overlap,
            rows_1=to.rows_3[part : part + 1],
        )
        return self.model.forward(batch, self.kv)
