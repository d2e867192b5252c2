"""What one attention group runs next: admission, chunked prefill, decode, preemption.

First come, first served: every running sequence arrived before every waiting one, and the one that
arrived last gives way when pages run out. The first of all can always get its pages, so something
always moves.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from crossdock.core import BROKEN, Plan, Request, Sampled, Scheduled, TokenOutput
from crossdock.scheduler.pages import PagePool, extend_digests, root_digest
from crossdock.scheduler.sequence import SequenceState

NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or its values leave the range of "
    "the dtype (float16 has the smallest: try bfloat16)"
)


class Scheduler:
    """Use: `plan`, `advance`, run the step, `observe`, over and over while `has_work`.

    `plan` and `advance` of the next step may come before `observe` of the one before (at most one
    step ahead); tokens not known yet are planned as -1. Steps must then run in order on one stream:
    pages are handed on as soon as they are released.

    Args:
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens per plan.
        max_model_len: tokens of a sequence, prompt and outputs. A sequence also ends ("length")
            when it has filled the whole KV cache, `num_pages * page_size` tokens.
        namespace: all that KV depends on beside tokens: model, dtype, KV layout.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        page_size: int,
        num_pages: int,
        prefix_caching: bool = True,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self._caching = prefix_caching
        self._root = root_digest(namespace)
        self._clock = clock
        self._seqs: dict[str, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._waiting: deque[SequenceState] = deque()
        self._ended: list[TokenOutput] = []
        self._planned: tuple[Plan, list[SequenceState]] | None = None
        self._launched: deque[tuple[Plan, list[SequenceState]]] = deque()
        self._totals = dict.fromkeys(
            (
                "num_preemptions_total",
                "prefix_cache_queries_total",
                "prefix_cache_hits_total",
                "prompt_tokens_total",
                "generation_tokens_total",
            ),
            0,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step is due: something to run, or an ending that `observe` will return."""
        return bool(self._running or self._waiting or self._ended)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run, or whose `emitted` tokens already end it, ends
        with the next `observe`.

        Raises:
            ValueError: its id is that of an open request.
        """
        if request.id in self._seqs:
            raise ValueError(f"request {request.id!r} is already open")
        # The last token of a sequence needs no KV.
        max_length = min(self.max_model_len, self.pool.num_pages * self.page_size + 1)
        seq = SequenceState(request, max_length, self._clock())
        ending = seq.ending()
        if ending is not None:
            reason, stop = ending
            self._ended.append(TokenOutput(request.id, (), reason, stop))
            return
        error = self._refusal(request)
        if error is not None:
            self._ended.append(TokenOutput(request.id, finish_reason="error", error=error))
            return
        self._seqs[request.id] = seq
        self._waiting.append(seq)

    def _refusal(self, request: Request) -> str | None:
        count = len(request.prompt_ids) + len(request.emitted)
        if count == 0:
            return "the prompt is empty; expected at least one token"
        if count >= self.max_model_len:
            return (
                f"the prompt has {count} tokens, and max_model_len is {self.max_model_len}: "
                "no room for an output"
            )
        if self._pages_for(count) > self.pool.num_pages:
            return (
                f"the prompt has {count} tokens and needs {self._pages_for(count)} KV pages of "
                f"{self.page_size}, and there are {self.pool.num_pages}; raise kv_memory_gib"
            )
        return None

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its pages at once, whether or not a launched plan holds it.

        Returns False if it is not open (any more). Nothing more is said of it.
        """
        seq = self._seqs.get(request_id)
        if seq is None:
            before = len(self._ended)
            self._ended = [o for o in self._ended if o.request_id != request_id]
            return len(self._ended) < before
        self._close(seq)
        return True

    def plan(self) -> Plan:
        """What to run next. One-token items come first: decodes, then prefills' last tokens.

        Counts nothing as run before `advance`; a plan that is not advanced may be replaced.
        """
        shares: dict[SequenceState, int] = {}
        budget = self._plan_running(shares)
        self._admit(shares, budget)
        seqs = [s for s, n in shares.items() if n == 1] + [s for s, n in shares.items() if n > 1]
        plan = Plan(tuple([self._item(seq, shares[seq]) for seq in seqs]))
        self._planned = plan, seqs
        return plan

    def _plan_running(self, shares: dict[SequenceState, int]) -> int:
        """Give the running sequences their shares; returns the tokens left."""
        budget = self.max_num_batched_tokens
        left = [(seq, seq.remaining) for seq in self._running]
        decodes = [pair for pair in left if pair[1] == 1]
        prefills = [pair for pair in left if pair[1] > 1]
        size = self.page_size
        for seq, remaining in decodes + prefills:
            count = remaining if remaining < budget else budget
            if not seq.running or count == 0:
                continue
            missing = -(-(seq.computed + count) // size) - len(seq.pages)
            if missing > 0:
                while missing > self.pool.available and seq.running:
                    budget += shares.pop(self._preempt_last(), 0)
                if not seq.running:
                    continue
                seq.pages += self.pool.allocate(missing)
            shares[seq] = count
            budget -= count
        return budget

    def _preempt_last(self) -> SequenceState:
        seq = self._running.pop()
        self._drop_pages(seq)
        seq.running = False
        self._waiting.appendleft(seq)
        self._totals["num_preemptions_total"] += 1
        return seq

    def _admit(self, shares: dict[SequenceState, int], budget: int) -> None:
        """Start waiting sequences, in order, while tokens, places and pages last.

        A sequence starts only if pages for all its tokens are there, not just for its first chunk.
        """
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            seq = self._waiting[0]
            hit = self._match(seq)
            needed = self._pages_for(len(seq.tokens)) - len(hit)
            room = self.pool.available - self.pool.count_cached(hit)
            if seq.pending or needed > room:
                return
            self._waiting.popleft()
            self._start(seq, hit)
            count = min(seq.remaining, budget)
            seq.pages += self.pool.allocate(self._pages_for(seq.computed + count) - len(hit))
            shares[seq] = count
            budget -= count

    def _match(self, seq: SequenceState) -> tuple[int, ...]:
        """Published pages of its prefix; never all its tokens, since the last must give logits."""
        if not self._caching:
            return ()
        extend_digests(seq.digests, seq.tokens, self.page_size, self._root)
        usable = (len(seq.tokens) - 1) // self.page_size
        return self.pool.match(seq.digests[:usable])

    def _start(self, seq: SequenceState, hit: tuple[int, ...]) -> None:
        self.pool.share(hit)
        seq.pages = hit
        seq.published = len(hit)
        seq.computed = len(hit) * self.page_size
        seq.running = True
        self._running.append(seq)
        if not seq.started:
            seq.started = True
            seq.queue_seconds = self._clock() - seq.arrived
            seq.num_cached = seq.computed
            if self._caching:
                self._totals["prefix_cache_queries_total"] += len(seq.tokens)
                self._totals["prefix_cache_hits_total"] += seq.computed

    def _item(self, seq: SequenceState, count: int) -> Scheduled:
        start = seq.computed
        length = len(seq.tokens) + seq.pending
        sample = start + count == length
        return Scheduled(
            seq.request,
            start,
            seq.slice(start, start + count),
            seq.pages,
            sample,
            length - seq.num_prompt,
            tuple(seq.tokens[seq.num_prompt :]) if seq.penalties and sample else (),
        )

    def advance(self, plan: Plan) -> None:
        """Count the plan as launched: the next one builds on it."""
        if self._planned is None or self._planned[0] is not plan:
            raise ValueError("advance wants the plan made last, once")
        seqs = self._planned[1]
        for item, seq in zip(plan.items, seqs, strict=True):
            if not seq.alive:
                continue
            seq.computed = item.start + len(item.tokens)
            if item.sample:
                seq.pending += 1
            if self._caching:
                self._publish(seq)
        self._launched.append(self._planned)
        self._planned = None

    def _publish(self, seq: SequenceState) -> None:
        full = min(seq.computed, len(seq.tokens)) // self.page_size
        if full > seq.published:
            extend_digests(seq.digests, seq.tokens, self.page_size, self._root)
            for index in range(seq.published, full):
                self.pool.publish(seq.pages[index], seq.digests[index])
            seq.published = full

    def observe(self, plan: Plan, sampled: Sequence[Sampled | None]) -> list[TokenOutput]:
        """What the oldest launched plan sampled, one entry per item (ignored where the item does
        not sample or its request is gone). Returns new tokens, and endings even without a token.
        """
        if not self._launched or self._launched[0][0] is not plan:
            raise ValueError("observe wants the oldest plan that was advanced, once")
        if len(sampled) != len(plan.items):
            raise ValueError(f"the plan has {len(plan.items)} items, got {len(sampled)} results")
        _, seqs = self._launched.popleft()
        outputs, self._ended = self._ended, []
        generated = 0
        for item, seq, token in zip(plan.items, seqs, sampled, strict=True):
            if item.sample and seq.alive:
                if token is None:
                    raise ValueError(f"request {seq.request.id!r} samples, got no token")
                if token.token_id == BROKEN:
                    outputs.append(self._fail(seq))
                    continue
                outputs.append(self._append(seq, token))
                generated += 1
        self._totals["generation_tokens_total"] += generated
        return outputs

    def _append(self, seq: SequenceState, token: Sampled) -> TokenOutput:
        first = len(seq.tokens) == seq.num_given
        seq.pending -= 1
        seq.tokens.append(token.token_id)
        ending = seq.ending()
        if ending is not None:
            self._close(seq)
        if not first and ending is None:
            return TokenOutput(seq.request.id, (token,))
        if first:
            self._totals["prompt_tokens_total"] += seq.num_prompt
        reason, stop = ending or (None, None)
        return TokenOutput(
            request_id=seq.request.id,
            tokens=(token,),
            finish_reason=reason,
            stop_token_id=stop,
            num_cached_tokens=seq.num_cached if first else 0,
            queue_seconds=seq.queue_seconds if first else 0.0,
        )

    def _fail(self, seq: SequenceState) -> TokenOutput:
        """Nobody else is to begin with what this one computed, though it may have no pages now."""
        self.pool.withdraw(seq.digests)
        self._close(seq)
        return TokenOutput(seq.request.id, finish_reason="error", error=NOT_FINITE)

    def _close(self, seq: SequenceState) -> None:
        (self._running if seq.running else self._waiting).remove(seq)
        self._drop_pages(seq)
        seq.alive = seq.running = False
        del self._seqs[seq.request.id]

    def _drop_pages(self, seq: SequenceState) -> None:
        self.pool.release(seq.pages)
        seq.pages = ()
        seq.computed = 0

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def stats(self) -> dict[str, float]:
        """Gauges and totals under vLLM's names, and pages by state; `queued_tokens` are those of
        waiting requests and of prompts not yet computed. `pages_reserved`: still due to the prompts
        of running sequences, out of the free and the cached; `kv_tokens`: KV in used pages, that of
        shared ones counted once."""
        pool = self.pool
        due = sum(self._pages_for(len(s.tokens)) - len(s.pages) for s in self._running)
        empty = sum(len(s.pages) * self.page_size - s.computed for s in self._running)
        unfinished = sum(s.remaining for s in self._running if s.remaining > 1)
        return {
            "num_requests_running": len(self._running),
            "num_requests_waiting": len(self._waiting),
            "kv_cache_usage_perc": pool.num_used / pool.num_pages,
            **self._totals,
            "pages_free": pool.num_free,
            "pages_cached": pool.num_cached,
            "pages_used": pool.num_used,
            "pages_reserved": max(0, due),
            "kv_tokens": pool.num_used * self.page_size - empty,
            "page_size": self.page_size,
            "queued_tokens": unfinished + sum(len(s.tokens) for s in self._waiting),
        }
