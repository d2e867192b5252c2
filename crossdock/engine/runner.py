"""Runs one rank's share of a step: batch, forward pass, logits, sampling."""

from collections.abc import Generator

import torch
from torch import Tensor

from crossdock.comm import Board
from crossdock.core import KV, Model, OverlapMode, Plan, Sampled
from crossdock.engine.batch import make_batch
from crossdock.engine.overlap import halve
from crossdock.engine.sampler import Sampler
from crossdock.metrics import Recorder


def drive(forward: Generator[None, None, Tensor]) -> Tensor:
    """Runs one forward straight through, with no work of another put where it yields."""
    while True:
        try:
            next(forward)
        except StopIteration as done:
            return done.value


def drive_both(*forwards: Generator[None, None, Tensor]) -> list[Tensor]:
    """Runs forwards of the same model alternately, each from where it yields to where it yields
    next; the first one is always ahead."""
    done: dict[int, Tensor] = {}
    while len(done) < len(forwards):
        for i, forward in enumerate(forwards):
            try:
                if i not in done:
                    next(forward)
            except StopIteration as ended:
                done[i] = ended.value
    return [done[i] for i in range(len(forwards))]


class Runner:
    def __init__(
        self,
        model: Model,
        kv: KV,
        sampler: Sampler,
        device: torch.device,
        recorder: Recorder,
        board: Board,
    ):
        self.board = board
        self.model, self.kv, self.sampler = model, kv, sampler
        self.device, self.recorder = device, recorder

    @torch.inference_mode()
    def run(
        self,
        plan: Plan,
        most_tokens: int | None = None,
        overlap: OverlapMode = "sbo",
        cut: int = 0,
    ) -> list[Sampled | None]:
        """One entry per item of `plan`, None where the prompt is not complete yet. Arguments as of
        `hidden`."""
        hidden_BH = self.hidden(plan, most_tokens, overlap, cut)
        wanted = [item for item in plan.items if item.sample]
        if not wanted:
            return [None] * len(plan.items)
        self.board.enter("sample")
        with self.recorder.span("sample"):
            logits_BV = self.model.logits(hidden_BH)
            sampled = iter(self.sampler.sample(logits_BV, wanted))
        return [next(sampled) if item.sample else None for item in plan.items]

    @torch.inference_mode()
    def hidden(self, plan: Plan, most_tokens: int | None, overlap: OverlapMode, cut: int) -> Tensor:
        """[B, H] of the items that sample, in the order of the plan.

        Args:
            most_tokens: of any rank in this step; with "tbo" of any half.
            overlap: the same on all ranks.
            cut: tokens of the first half, with "tbo".
        """
        size, device = self.kv.page_size, self.device
        if overlap != "tbo":
            batch = make_batch(plan, size, device, most_tokens, overlap)
            return drive(self.model.forward(batch, self.kv))[batch.sample_rows]
        batches = [make_batch(h, size, device, most_tokens, "tbo") for h in halve(plan, cut, size)]
        hidden = drive_both(*(self.model.forward(batch, self.kv) for batch in batches))
        rows = [h_TH[b.sample_rows] for h_TH, b in zip(hidden, batches, strict=True)]
        return torch.cat(rows)
