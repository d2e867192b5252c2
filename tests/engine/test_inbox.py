"""Ranks of an attention group are told the same at the same step, however news arrives."""

import random

import pytest

from crossdock.core import CrossdockError, Plan, Request, Sampled, SamplingParams
from crossdock.engine.group import Inbox
from crossdock.scheduler import Scheduler


def scheduler() -> Scheduler:
    return Scheduler(
        max_num_seqs=6, max_num_batched_tokens=20, max_model_len=60, page_size=4, num_pages=40
    )


def news_of(draw: random.Random, count: int) -> list[tuple[str, object]]:
    """What the gateway says: requests, and ends of some of them."""
    said: list[tuple[str, object]] = []
    for i in range(count):
        prompt = tuple(draw.randrange(50) for _ in range(draw.randrange(1, 30)))
        params = SamplingParams(max_tokens=draw.randrange(1, 20), ignore_eos=True)
        said.append(("add", Request(f"r{i}", prompt, params)))
        if draw.random() < 0.4:
            said.append(("abort", f"r{draw.randrange(i + 1)}"))
    return said


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("ahead", [0, 1])
def test_all_plan_the_same(size: int, ahead: int) -> None:
    draw = random.Random()
    said = news_of(draw, 30)
    ranks = [(s := scheduler(), Inbox(s, 4, size)) for _ in range(size)]
    heard, launched = [0] * size, [[] for _ in range(size)]
    plans, outputs = 0, [[] for _ in range(size)]
    while any(s.has_work or box.waits for s, box in ranks) or min(heard) < len(said):
        made = [s.plan() for s, _ in ranks]
        plans += bool(made[0].items)
        assert len({repr(plan) for plan in made}) == 1
        for r, (_, box) in enumerate(ranks):  # news comes at any time, not only between steps
            for kind, what in said[heard[r] : (upto := draw.randint(heard[r], len(said)))]:
                getattr(box, kind)(what)
            heard[r] = upto
        table = [(0,)] * 4 + [box.words(plan) for (_, box), plan in zip(ranks, made, strict=True)]
        for r, ((s, box), plan) in enumerate(zip(ranks, made, strict=True)):
            box.advance(table)
            s.advance(plan)
            launched[r].append(plan)
            if len(launched[r]) > ahead or not plan.items:
                while launched[r]:
                    done = launched[r].pop(0)
                    tokens = [Sampled(i.start % 50) if i.sample else None for i in done.items]
                    outputs[r] += s.observe(done, tokens)
    assert plans > 10
    timeless = [[(o.request_id, o.tokens, o.finish_reason) for o in rank] for rank in outputs]
    assert timeless[0] and all(rank == timeless[0] for rank in timeless)
    assert all(s.pool.num_used == 0 for s, _ in ranks)


def test_different_plans_are_an_error() -> None:
    boxes = [Inbox(scheduler(), 0, 2) for _ in range(2)]
    one = scheduler()
    one.add(Request("a", (1, 2, 3), SamplingParams()))
    table = [boxes[0].words(one.plan()), boxes[1].words(Plan())]
    with pytest.raises(CrossdockError, match="ranks 0 to 1 share an attention group and planned"):
        boxes[0].advance(table)
