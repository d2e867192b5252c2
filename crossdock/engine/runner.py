"""Runs one rank's share of a step: batch, forward pass, logits, sampling."""

from collections.abc import Generator

import torch
from torch import Tensor

from crossdock.comm import Board
from crossdock.core import KV, Model, Plan, Sampled
from crossdock.engine.batch import make_batch
from crossdock.engine.sampler import Sampler
from crossdock.metrics import Recorder


def drive(forward: Generator[None, None, Tensor]) -> Tensor:
    """Runs one forward straight through, with no work of another put where it yields."""
    while True:
        try:
            next(forward)
        except StopIteration as done:
            return done.value


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
    def run(self, plan: Plan, most_tokens: int | None = None) -> list[Sampled | None]:
        """One entry per item of `plan`, None where the prompt is not complete yet. `most_tokens`:
        of any rank in this step."""
        batch = make_batch(plan, self.kv.page_size, self.device, most_tokens)
        hidden_TH = drive(self.model.forward(batch, self.kv))
        wanted = [item for item in plan.items if item.sample]
        if not wanted:
            return [None] * len(plan.items)
        self.board.enter("sample")
        with self.recorder.span("sample"):
            logits_BV = self.model.logits(hidden_TH[batch.sample_rows])
            sampled = iter(self.sampler.sample(logits_BV, wanted))
        return [next(sampled) if item.sample else None for item in plan.items]
