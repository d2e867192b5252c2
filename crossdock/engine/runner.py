"""Runs one rank's share of a step: batch, forward pass, logits, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crossdock.comm import Board
from crossdock.core import KV, Model, OverlapMode, Plan, Sampled
from crossdock.core.batch import GraphSize
from crossdock.engine.batch import Drawn, make_batch
from crossdock.engine.drive import drive, drive_both
from crossdock.engine.overlap import halve
from crossdock.engine.sampler import Sampler, launched_until_now
from crossdock.metrics import Recorder, StepTiming


class Graphs(Protocol):
    """`StepGraphs`, which imports triton, and ranks on CPUs do without."""

    decode_sizes: tuple[int, ...]

    def describe(self) -> str: ...
    def capture_all(self, mode_of: Callable[[GraphSize], OverlapMode | None]) -> None: ...
    def need(self, plan: Plan) -> int: ...
    def fit(self, need: int, tokens: int) -> GraphSize | None: ...
    def capture(self, size: GraphSize, overlap: OverlapMode, timed: bool = False) -> None: ...
    def timing(self, size: GraphSize, overlap: OverlapMode) -> StepTiming: ...
    def replay(
        self,
        plan: Plan,
        size: GraphSize,
        overlap: OverlapMode,
        drawn: Drawn | None = None,
        timed: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True)
class How:
    """A step, alike on all ranks but for `cut`.

    most_tokens: of any rank, with "tbo" of any half; None: at most what the transport takes.
    cut: tokens of the first half, with "tbo". graph: what is replayed.
    """

    most_tokens: int | None = None
    overlap: OverlapMode = "sbo"
    cut: int = 0
    graph: GraphSize | None = None


@dataclass(frozen=True, eq=False)
class Launched:
    """A step on its way through the device. `wait`: for its end and its tokens; `check` raises what
    its exchanges left behind."""

    plan: Plan
    wait: Callable[[], Sequence[Sampled | None]]
    check: Callable[[], None]

    def read(self) -> list[Sampled | None]:
        """Waits, also where nothing samples: else the host would run ahead without end. One entry
        per item, None where the prompt is not complete yet."""
        sampled = self.wait()
        self.check()
        tokens = iter(sampled)
        return [next(tokens) if item.sample else None for item in self.plan.items]


class Runner:
    """Launches a step without waiting for the one before, whose tokens need not be known: the next
    step takes them on the device. `graphs`: None where every step runs eagerly."""

    def __init__(
        self,
        model: Model,
        kv: KV,
        sampler: Sampler,
        device: torch.device,
        recorder: Recorder,
        board: Board,
        check: Callable[[], None],
        graphs: Graphs | None = None,
        why_eager: str | None = None,
    ):
        """`why_eager`: where there are no graphs."""
        self.board, self.graphs = board, graphs
        self.model, self.kv, self.sampler = model, kv, sampler
        self.device, self.recorder, self._check = device, recorder, check
        self._drawn: Drawn | None = None
        self._why_eager = why_eager

    @property
    def graphs_line(self) -> str:
        """What is replayed, or why nothing."""
        return f"none: {self._why_eager}" if self.graphs is None else self.graphs.describe()

    @torch.inference_mode()
    def launch(self, plan: Plan, how: How, timed: bool = False) -> Launched:
        """`timed`: by the graph that has events inside."""
        if how.graph is None:
            logits_BV = self._eager(plan, how)
        else:
            assert self.graphs is not None
            self.board.enter("forward")
            logits_BV = self.graphs.replay(plan, how.graph, how.overlap, self._drawn, timed)
        wanted = [item for item in plan.items if item.sample]
        if not wanted:
            self._drawn, past = None, launched_until_now(self.device)
            return Launched(plan, lambda: past() or (), self._check)
        self.board.enter("sample")
        with self.recorder.span("sample"):
            draw = self.sampler.draw(logits_BV, wanted)
        self._drawn = Drawn(draw.ids_B, {item.request.id: i for i, item in enumerate(wanted)})
        return Launched(plan, draw.read, self._check)

    def run(self, plan: Plan, how: How) -> list[Sampled | None]:
        """As `launch`, and waits."""
        return self.launch(plan, how).read()

    def _eager(self, plan: Plan, how: How) -> Tensor:
        hidden_BH = self.hidden(plan, how)
        if not len(hidden_BH):
            return hidden_BH
        with self.recorder.span("sample"):
            return self.model.logits(hidden_BH)

    @torch.inference_mode()
    def hidden(self, plan: Plan, how: How) -> Tensor:
        """[B, H] of the items that sample, in the order of the plan; runs eagerly."""
        size, device, drawn = self.kv.page_size, self.device, self._drawn
        if how.overlap != "tbo":
            batch = make_batch(plan, size, device, how.most_tokens, how.overlap, drawn)
            return drive(self.model.forward(batch, self.kv))[batch.sample_rows]
        halves = halve(plan, how.cut, size)
        batches = [make_batch(h, size, device, how.most_tokens, "tbo", drawn) for h in halves]
        hidden = drive_both(*(self.model.forward(batch, self.kv) for batch in batches))
        rows = [h_TH[b.sample_rows] for h_TH, b in zip(hidden, batches, strict=True)]
        return torch.cat(rows)
