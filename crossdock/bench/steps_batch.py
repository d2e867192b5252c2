"""Made-up batches of a given shape, for measuring single steps."""

import random
from dataclasses import dataclass

from crossdock.core import Plan, Request, SamplingParams, Scheduled

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Batch:
    """Of a rank: `decodes` sequences that see `context` tokens and sample; then `prompt_tokens` of
    prompts of `prompt_len` each, the last one shorter, that do not."""

    decodes: int = 0
    context: int = 1
    prompt_tokens: int = 0
    prompt_len: int = 1

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    def without_prompts(self) -> "Batch":
        return Batch(self.decodes, self.context)

    def without_decodes(self) -> "Batch":
        return Batch(0, self.context, self.prompt_tokens, self.prompt_len)


def plan_of(batch: Batch, page_size: int, num_pages: int, vocab_size: int, seed: int) -> Plan:
    """Every sequence on pages of its own, while there are enough; then from the first on again."""
    draw = random.Random(seed)
    items: list[Scheduled] = []
    used = 0

    def add(start: int, count: int, sample: bool) -> None:
        nonlocal used
        pages = -(-(start + count) // page_size)
        mine = tuple((used + n) % num_pages for n in range(pages))
        used += pages
        ids = tuple(draw.randrange(vocab_size) for _ in range(count))
        request = Request(str(len(items)), ids, _GREEDY, key=draw.getrandbits(63))
        items.append(Scheduled(request, start, ids, mine, sample))

    for _ in range(batch.decodes):
        add(batch.context - 1, 1, True)
    left = batch.prompt_tokens
    while left > 0:
        # One token alone would look like a decode out of its place.
        count = left if left <= batch.prompt_len + 1 else batch.prompt_len
        add(0, count, False)
        left -= count
    return Plan(tuple(items))
