"""Steps of made-up batches, before any request: to be measured, or for what they compile."""

import random
import time
from dataclasses import dataclass, replace

import torch

from crossdock.comm import World, await_start
from crossdock.core import OverlapMode, Plan, Request, SamplingParams, Scheduled
from crossdock.engine.overlap import middle
from crossdock.engine.runner import How, Runner
from crossdock.engine.sampler import Sampler

_CONTEXT = 64
"""Tokens that decodes see at most."""
_PROMPT = 1024
"""Tokens of a prompt, at most."""
_ROWS, _TOKENS = (1, 3, 16), (37, 512)
"""Sizes for which kernels differ (1, multiples of 16, others); the largest step comes last."""


@dataclass(frozen=True)
class Limits:
    """Of a step and of the cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int


def warm_up(runner: Runner, world: World, limits: Limits, mode: OverlapMode) -> None:
    """Compiles what steps that run eagerly use. Collective."""
    world.board.enter("agree", step=0)
    await_start(world)
    meter, most = Meter(runner, world), limits.max_num_batched_tokens
    rows = [n for n in (*_ROWS, limits.max_num_seqs) if n <= min(most, limits.max_num_seqs)]
    group = world.rank // world.tp
    plans = [made_up(n, limits, group) for n in rows]
    plans += [prefills(n, limits, group) for n in (*_TOKENS, most) if n <= most]
    for plan in plans:
        meter.seconds(plan, mode, eager=True)
    runner.kv.clear(meter.pages)


def warm_sampler(sampler: Sampler) -> None:
    """The same of sampling, which differs with its parameters. Collective in attention groups."""
    kinds = (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=5),
        SamplingParams(temperature=0.8, repetition_penalty=1.1, min_p=0.1),
    )
    for count in (1, 3, 16):
        params = [kinds[i % len(kinds)] for i in range(count)]
        requests = [Request(str(i), (1, 2), p) for i, p in enumerate(params)]
        items = [Scheduled(r, 1, (2,), (0,), True, 0, (1,)) for r in requests]
        logits_BV = torch.zeros(count, sampler.vocab_size, device=sampler.device)
        sampler.sample(logits_BV, items)


class Meter:
    """`pages`: how many of the cache, from the first on, steps have written."""

    def __init__(self, runner: Runner, world: World):
        self._runner, self._world, self.pages = runner, world, 0

    def seconds(self, plan: Plan, mode: OverlapMode, eager: bool = False) -> float:
        """A step on all ranks, every one of which has a plan of this shape; of the slowest.
        `eager`: also where a graph takes it."""
        device, lockstep = self._world.device, self._world.lockstep
        self.pages = max(self.pages, *(1 + page for item in plan.items for page in item.pages))
        how = self._how(plan, mode, eager)
        lockstep.exchange((0,))
        start = time.perf_counter()
        self._runner.run(plan, how)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        return max(row[0] for row in lockstep.exchange((int(took * 1e9),))) / 1e9

    def _how(self, plan: Plan, mode: OverlapMode, eager: bool) -> How:
        tokens, graphs = plan.num_tokens, None if eager else self._runner.graphs
        size = None if graphs is None else graphs.fit(graphs.need(plan), tokens)
        if graphs is not None and size is not None and (size.halves or mode != "tbo"):
            graphs.capture(size, mode)
            return How(size.rows, mode, graph=size)
        cut = middle([len(item.tokens) for item in plan.items])
        return How(tokens if mode != "tbo" else max(cut, tokens - cut), mode, cut)


def prefills(tokens: int, limits: Limits, group: int) -> Plan:
    """Prompts of one length; as `made_up`."""
    count = min(-(-tokens // min(_PROMPT, limits.max_model_len)), limits.max_num_seqs)
    return made_up(tokens, replace(limits, max_num_seqs=count), group)


def made_up(tokens: int, limits: Limits, group: int) -> Plan:
    """Decodes while there are sequences enough, else prefills of one length; none of them samples.
    The same on all ranks of an attention group, `group` by number.
    Sequences use pages in turn, so that few of a large cache are touched."""
    count = min(tokens, limits.max_num_seqs)
    length = min(-(-tokens // count), limits.max_model_len, limits.num_pages * limits.page_size)
    start = min(_CONTEXT, limits.max_model_len - 1) if length == 1 else 0
    start = min(start, limits.num_pages * limits.page_size - 1)
    draw = random.Random(group)
    pages_each = -(-(start + length) // limits.page_size)
    items: list[Scheduled] = []
    for i in range(count):
        here = min(length, tokens - i * length)
        if here <= 0:
            break
        first = i * pages_each
        pages = tuple((first + n) % limits.num_pages for n in range(pages_each))
        ids = tuple(draw.randrange(limits.vocab_size) for _ in range(here))
        request = Request(str(i), ids, SamplingParams(), key=draw.getrandbits(63))
        items.append(Scheduled(request, start, ids, pages, sample=False))
    items.sort(key=lambda item: len(item.tokens) > 1)
    return Plan(tuple(items))
