"""The progress of one request on this rank."""

from crossdock.core.request import FinishReason, Request

PENDING = -1
"""Stands in a plan for the token that the launched step before is sampling."""


class SequenceState:
    """What the scheduler knows of one request; changed by the scheduler alone.

    `computed`: leading tokens whose KV is there or launched. `pending`: tokens that launched steps
    are sampling. `length` counts them, `tokens` does not hold them yet. `num_given`: prompt and
    outputs made elsewhere. Preemption sets `computed`
    back to 0 and keeps `tokens`, so that prompt and outputs are recomputed alike.
    """

    __slots__ = (
        "alive",
        "arrived",
        "computed",
        "digests",
        "eos",
        "max_length",
        "num_cached",
        "num_given",
        "num_prompt",
        "pages",
        "penalties",
        "pending",
        "published",
        "queue_seconds",
        "request",
        "running",
        "started",
        "stops",
        "tokens",
    )

    def __init__(self, request: Request, max_length: int, arrived: float):
        params = request.params
        self.request = request
        self.arrived = arrived
        self.tokens = [*request.prompt_ids, *request.emitted]
        self.num_prompt = len(request.prompt_ids)
        self.num_given = len(self.tokens)
        self.max_length = max_length
        if params.max_tokens is not None:
            self.max_length = min(max_length, self.num_prompt + params.max_tokens)
        self.eos = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self.stops = frozenset(params.stop_token_ids)
        self.penalties = params.has_penalties
        self.computed = 0
        self.pending = 0
        self.pages: tuple[int, ...] = ()
        self.digests: list[bytes] = []
        self.published = 0
        self.num_cached = 0
        self.queue_seconds = 0.0
        self.alive = True
        self.running = False
        self.started = False

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) + self.pending - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that could be computed in the next plan; 1 where the sequence decodes."""
        length = len(self.tokens) + self.pending
        if self.pending and (length >= self.max_length or self.penalties):
            return 0  # ends with the token in flight, or needs it for its penalties
        return length - self.computed

    def slice(self, start: int, end: int) -> tuple[int, ...]:
        if end <= len(self.tokens):
            return (self.tokens[start],) if end - start == 1 else tuple(self.tokens[start:end])
        known = tuple(self.tokens[start:])
        return known + (PENDING,) * (end - start - len(known))

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """`(finish reason, stop id)` if the last output ends the sequence, else None.

        The stop id is given for `stop_token_ids`, not for the end of sequence, as vLLM does.
        """
        length = len(self.tokens)
        if length <= self.num_prompt:
            return None
        if (self.eos or self.stops) and (
            length - self.num_prompt >= self.request.params.min_tokens
        ):
            last = self.tokens[-1]
            if last in self.eos:
                return "stop", None
            if last in self.stops:
                return "stop", last
        return ("length", None) if length >= self.max_length else None
