"""The scheduler drives a fake model whose every token depends on all KV it reads, so that a page
handed to two, a stale prefix or a token computed twice or out of order shows in the answers."""

import random
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core import Request, Sampled, SamplingParams
from crossdock.scheduler import Scheduler

VOCAB = 11
EOS = 0


def next_token(tokens):
    digest = blake2b(b"".join(t.to_bytes(4, "little") for t in tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected(request, max_length):
    """The outputs of a request that runs alone on a machine without limits, and how it ends."""
    p = request.params
    tokens = [*request.prompt_ids, *request.emitted]
    first, reason = len(tokens), None
    while reason is None:
        tokens.append(next_token(tokens))
        made = len(tokens) - len(request.prompt_ids)
        if tokens[-1] == EOS and not p.ignore_eos and made >= p.min_tokens:
            reason = "stop"
        elif (p.max_tokens and made >= p.max_tokens) or len(tokens) >= max_length:
            reason = "length"
    return tokens[first:], reason


@dataclass
class Machine:
    """Runs plans as a rank would, `lag` steps late, and checks every plan against the limits."""

    scheduler: Scheduler
    lag: int
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    results: dict[str, list[int]] = field(default_factory=dict)
    endings: dict[str, str] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)
    inflight: deque = field(default_factory=deque)
    restarts: int = 0

    def step(self, replan, news=lambda: None):
        """`news`: what a group's ranks hear of in the lockstep, between plan and advance."""
        s = self.scheduler
        plan = s.plan()
        if replan:
            plan = s.plan()
        self.check(plan)
        news()
        s.advance(plan)
        self.inflight.append((plan, self.run(plan)))
        while len(self.inflight) > self.lag:
            self.observe()

    def observe(self):
        for output in self.scheduler.observe(*self.inflight.popleft()):
            assert output.request_id not in self.endings
            self.results.setdefault(output.request_id, []).extend(
                token.token_id for token in output.tokens
            )
            if output.finish_reason:
                self.endings[output.request_id] = output.finish_reason

    def check(self, plan):
        s = self.scheduler
        assert plan.num_tokens <= s.max_num_batched_tokens
        assert len(plan.items) <= s.num_running <= s.max_num_seqs
        ones = [len(item.tokens) == 1 for item in plan.items]
        assert ones == sorted(ones, reverse=True)
        assert len({item.request.id for item in plan.items}) == len(plan.items)
        written, read = set(), []
        restarts = 0
        for item in plan.items:
            end = item.start + len(item.tokens)
            assert len(item.pages) == -(-end // s.page_size)
            assert len(set(item.pages)) == len(item.pages)
            p = item.request.params
            assert end < s.max_model_len  # the last token of all needs no KV
            assert p.max_tokens is None or end < len(item.request.prompt_ids) + p.max_tokens
            mine = set(item.pages[item.start // s.page_size :])
            assert not mine & written
            written |= mine
            read.append(set(item.pages[: item.start // s.page_size]))
            if item.start != self.computed.get(item.request.id, 0):
                restarts += item.request.id in self.computed
                assert item.start % s.page_size == 0  # a prefix hit
            self.computed[item.request.id] = end
        assert not any(pages & written for pages in read)
        # Nobody goes back without having been preempted: between preemptions each token is
        # computed once, in order.
        self.restarts += restarts
        assert self.restarts <= s.stats()["num_preemptions_total"]

    def run(self, plan):
        sampled = []
        size = self.scheduler.page_size
        for item in plan.items:
            for offset, token in enumerate(item.tokens):
                page, at = divmod(item.start + offset, size)
                token = self.sampled[item.request.id] if token == -1 else token
                self.kv[item.pages[page], at] = token
            if item.sample:
                end = item.start + len(item.tokens)
                seen = [self.kv[item.pages[i // size], i % size] for i in range(end)]
                assert item.num_outputs == end - len(item.request.prompt_ids)
                if item.request.params.has_penalties:
                    assert tuple(seen[len(item.request.prompt_ids) :]) == item.output_ids
                self.sampled[item.request.id] = next_token(seen)
                sampled.append(Sampled(self.sampled[item.request.id]))
            else:
                sampled.append(None)
        return sampled


def make_requests(rng, amount, longest):
    shared = [rng.randrange(VOCAB) for _ in range(longest)]
    requests = []
    for number in range(amount):
        length = rng.randint(1, longest)
        common = rng.choice((0, 0, length, rng.randint(0, length)))
        prompt = [*shared[:common], *(rng.randrange(VOCAB) for _ in range(length - common))]
        params = SamplingParams(
            max_tokens=rng.choice((None, 30, 30, 12, 1)),
            min_tokens=rng.choice((0, 0, 1)),
            ignore_eos=rng.random() < 0.5,
            presence_penalty=rng.choice((0.0, 0.0, 1.0)),
        )
        # Some come from elsewhere, with outputs already made.
        request = Request(f"r{number}", tuple(prompt), params, (EOS,))
        outputs, _ = expected(request, longest + 40)
        emitted = tuple(outputs[: rng.choice((0, 0, len(outputs) // 2))])
        requests.append(Request(f"r{number}", tuple(prompt), params, (EOS,), emitted=emitted))
    return requests


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lag=st.sampled_from([0, 0, 1]),
    caching=st.booleans(),
    page_size=st.integers(1, 7),
    spare_pages=st.integers(0, 40),
    budget=st.integers(1, 60),
    max_num_seqs=st.integers(1, 9),
    aborts=st.sampled_from([0.0, 0.05]),
)
def test_answers_do_not_depend_on_the_schedule(
    seed, lag, caching, page_size, spare_pages, budget, max_num_seqs, aborts
):
    rng = random.Random(seed)
    longest = 40
    s = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest + 40,
        page_size=page_size,
        num_pages=-(-longest // page_size) + spare_pages,  # the longest prompt fits alone
        prefix_caching=caching,
    )
    machine = Machine(s, lag)
    max_length = min(longest + 40, s.pool.num_pages * page_size + 1)
    requests = [
        r
        for r in make_requests(rng, 14, longest)
        if len(r.prompt_ids) + len(r.emitted) < max_length
    ]
    arriving, aborted, steps = deque(requests), set(), 0

    def news():
        for _ in range(rng.choice((0, 0, 1, 4))):
            if arriving:
                s.add(arriving.popleft())
        if rng.random() < aborts:
            name = rng.choice(requests).id
            if s.abort(name):
                aborted.add(name)

    while s.has_work or arriving or machine.inflight:
        news()
        if s.has_work or not machine.inflight:
            machine.step(rng.random() < 0.2, news)
        else:
            machine.observe()
        steps += 1
        assert steps < 20000, "it does not end"
        assert not aborted & machine.endings.keys()

    for request in requests:
        if request.id not in aborted:
            outputs, reason = expected(request, max_length)
            assert machine.results[request.id] == outputs
            assert machine.endings[request.id] == reason
    stats = s.stats()
    assert stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == s.pool.num_pages
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    if not aborted:
        total = sum(len(tokens) for tokens in machine.results.values())
        assert stats["generation_tokens_total"] == total


def test_a_cache_for_one_serves_many():
    """Every request needs most of the pages: heavy preemption, and still an end."""
    rng = random.Random(3)
    s = Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=200,
        page_size=4,
        num_pages=26,
    )
    machine = Machine(s, 0)
    requests = [
        Request(
            f"r{i}",
            tuple(rng.randrange(VOCAB) for _ in range(20)),
            SamplingParams(max_tokens=80, ignore_eos=True),
            (EOS,),
        )
        for i in range(8)
    ]
    for request in requests:
        s.add(request)
    steps = 0
    while s.has_work:
        machine.step(replan=False)
        steps += 1
    for request in requests:
        assert machine.results[request.id] == expected(request, 105)[0]
    assert s.stats()["num_preemptions_total"] > 0
    assert steps < 8 * 80
