"""What a captured step reads and gives, with a model that returns what it was given: steps run here
where a GPU would replay them."""

import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crossdock.core import ForwardBatch, Plan, Request, SamplingParams, Scheduled
from crossdock.core.batch import CapturedStep
from crossdock.engine.batch import Drawn
from crossdock.engine.graphs import StepGraphs
from crossdock.engine.overlap import even_cut
from crossdock.metrics import Recorder

CPU, PAGE = torch.device("cpu"), 16


class Echo:
    """Hidden states are token, position and slot of each row; -1 beyond the rows in use."""

    def lay_out(self, step: CapturedStep) -> None:
        self.laid_out = step

    def forward(self, batch: ForwardBatch, kv):
        rows = torch.stack((batch.tokens_T, batch.positions_T, batch.kv_slots_T), 1)
        assert batch.rows_1 is not None and batch.most_tokens == batch.num_tokens
        assert batch.num_tokens >= batch.num_decodes
        yield
        used = torch.arange(batch.num_tokens)[:, None] < batch.rows_1
        assert (batch.kv_slots_T[int(batch.rows_1) :] == -1).all()
        if batch.prefill_starts_B1 is not None:
            assert int(batch.prefill_starts_B1[-1]) == int(batch.rows_1)
            assert int(batch.kv_lens_B[batch.num_decodes :].sum()) <= batch.prefill_keys
        if batch.overlap != "tbo":
            self.check_lengths(batch)
        return torch.where(used, rows, -1)

    def check_lengths(self, batch: ForwardBatch) -> None:
        """The host was told what the device reads."""
        step, lens = self.laid_out, batch.kv_lens_B.tolist()
        n, prompts = step.num_decodes, len(step.kv_lens_B) - step.num_decodes
        want = step.kv_lens_B.tolist()
        assert lens[:n] == want[:n] and not any(lens[n : batch.num_decodes])
        assert (step.sequences, step.tokens, step.pages) == (8, 1024, 2048 // PAGE)
        if batch.prefill_starts_B1 is not None:
            assert lens[batch.num_decodes :][:prompts] == want[n:]
            starts = batch.prefill_starts_B1.diff().tolist()
            assert starts[:prompts] == step.query_lens_B[n:].tolist() and not any(starts[prompts:])

    def logits(self, hidden_BH, out_BV):
        return out_BV.copy_(hidden_BH.float())


def draw_plan(
    rng: random.Random, decodes: int, prompts: int, most: int, prefix: int
) -> tuple[Plan, Drawn]:
    items, rows = [], {}
    ids_B = torch.randint(1000, (decodes + 1,))
    for i in range(decodes + prompts):
        count = 1 if i < decodes else rng.randint(2, max(2, most // max(prompts, 1)))
        start = rng.randrange(40) if i < decodes else rng.choice((0, 16, prefix))
        tokens = tuple(rng.randrange(1000) for _ in range(count))
        name = str(i)
        if i < decodes and rng.random() < 0.5:
            tokens, rows[name] = (-1,), rng.randrange(decodes + 1)
        pages = tuple(rng.sample(range(500), -(-(start + count) // PAGE)))
        request = Request(name, (1,), SamplingParams(), key=rng.getrandbits(64))
        items.append(Scheduled(request, start, tokens, pages, rng.random() < 0.8))
    return Plan(tuple(items)), Drawn(ids_B, rows)


def expected(plan: Plan, drawn: Drawn) -> list[list[int]]:
    rows = []
    for item in plan.items:
        at = item.start + len(item.tokens) - 1
        token = item.tokens[-1]
        if token < 0:
            token = int(drawn.ids_B[drawn.rows[item.request.id]])
        if item.sample:
            rows.append([token, at, item.pages[at // PAGE] * PAGE + at % PAGE])
    return rows


@pytest.mark.parametrize("mode", ["off", "sbo", "tbo"])
@pytest.mark.parametrize("copies", ["none", "expanded", "gathered"])
def test_rows_that_sample_come_in_the_order_of_the_plan(mode, copies, monkeypatch):
    kv = SimpleNamespace(page_size=PAGE)
    graphs = StepGraphs(Echo(), kv, 8, 1024, 2048, 3, copies, CPU, Recorder())
    fake = SimpleNamespace(graph=SimpleNamespace(replay=lambda: graphs._step(size, mode)))
    rng = random.Random(f"{mode}{copies}")
    replayed = set()
    for _ in range(60):
        decodes = rng.choice((0, 0, 1, 3, 8))
        prompts = rng.choice((0, 1, 2, 5)) if decodes < 8 else 0
        plan, drawn = draw_plan(rng, decodes, prompts, 900, 608 if copies == "gathered" else 32)
        size = graphs.fit(graphs.need(plan), plan.num_tokens + rng.choice((0, 20)))
        if size is None or (mode == "tbo" and not size.halves):
            continue
        monkeypatch.setattr(graphs, "_graphs", {(size, mode, False): fake})
        graphs.logits_BV.fill_(-7)
        got_BV = graphs.replay(plan, size, mode, drawn)
        assert got_BV.int().tolist() == expected(plan, drawn)
        replayed.add(size)
    assert len(replayed) > 4 and {size.prompts for size in replayed} == {False, True}


def test_long_prefixes_take_larger_graphs_only_where_their_keys_are_expanded():
    kv = SimpleNamespace(page_size=PAGE)
    request = Request("a", (1,), SamplingParams())

    def size(copies: str, prefix: int) -> int | None:
        graphs = StepGraphs(Echo(), kv, 8, 1024, 8192, 3, copies, CPU, Recorder())
        plan = Plan((Scheduled(request, prefix, (1,) * 100, (), True),))
        fit = graphs.fit(graphs.need(plan), 100)
        return fit and fit.rows

    assert [size("none", n) for n in (0, 1000, 3996, 3997)] == [256] * 4
    assert [size("expanded", n) for n in (0, 860, 861, 3996)] == [256, 768, 1024, None]
    assert [size("gathered", n) for n in (0, 1000, 3996, 3997)] == [256, 256, 256, None]


def test_cuts_leave_no_single_token_and_no_more_than_there_is_room_for():
    rng = np.random.default_rng(0)
    for _ in range(300):
        lens = sorted(rng.integers(1, 40, rng.integers(1, 9)).tolist(), key=lambda n: n > 1)
        total, cut = sum(lens), even_cut(lens)
        assert total // 2 <= cut <= total // 2 + 1 or total < 2
        starts = np.cumsum([0, *lens])
        inside = [cut - a for a, b in pairwise(starts) if a < cut < b]
        assert all(part >= 2 for part in inside)
    assert even_cut([]) == 0
