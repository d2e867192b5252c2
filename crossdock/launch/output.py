"""From token ids to what a user sees: text deltas, stop strings, logprobs with their text."""

from dataclasses import dataclass

from crossdock.core import Sampled, SamplingParams, TokenLogprob, TokenOutput
from crossdock.models.detokenizer import Detokenizer, StopChecker
from crossdock.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: "tuple[TokenLogprobs, ...]" = ()


@dataclass(slots=True)
class Update:
    """News of one choice of a request: a text delta and its tokens; the last has a finish_reason.

    `stop_reason`: the stop string or stop token id that ended it. `error` goes with
    finish_reason "error". Not frozen, since one is made for every token.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    error: str | None = None


class Choice:
    """One of the n continuations of a request, as it grows."""

    def __init__(self, index: int, group: int, params: SamplingParams, tokenizer: Tokenizer):
        self.index, self.group, self.params = index, group, params
        self.is_new = True
        self._num_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> Update:
        """The update for `output`; ends early, with finish_reason "stop", at a stop string."""
        self.is_new = False
        text, used = "", 0
        stopped: str | None = None
        for sampled in output.tokens:
            used += 1
            self._num_tokens += 1
            if self._is_silent(sampled, output):
                continue
            delta, stopped = self._checked(self._detokenizer.push((sampled.token_id,)))
            text += delta
            if stopped is not None:
                break
        finish: str | None = output.finish_reason
        reason: int | str | None = output.stop_token_id
        if stopped is not None:
            finish, reason = "stop", stopped
        elif finish is not None:
            delta, stopped = self._checked(self._detokenizer.flush())
            text += delta + (self._stops.flush() if stopped is None else "")
        return Update(
            index=self.index,
            text=text,
            token_ids=tuple(s.token_id for s in output.tokens[:used]),
            logprobs=tuple(self._logprobs(s) for s in output.tokens[:used] if s.logprob),
            finish_reason=finish,
            stop_reason=reason,
            num_cached_tokens=output.num_cached_tokens,
            queue_seconds=output.queue_seconds,
            error=output.error,
        )

    def _checked(self, text: str) -> tuple[str, str | None]:
        """As `StopChecker.push`, which sees only what comes after the first min_tokens tokens."""
        if self._num_tokens <= self.params.min_tokens:
            return text, None
        return self._stops.push(text)

    def _is_silent(self, sampled: Sampled, output: TokenOutput) -> bool:
        """A stop token ends the text and is no part of it."""
        return (
            output.stop_token_id == sampled.token_id
            and sampled is output.tokens[-1]
            and not self.params.include_stop_str_in_output
        )

    def _logprobs(self, sampled: Sampled) -> TokenLogprobs:
        assert sampled.logprob is not None
        return self._with_text(sampled.logprob, tuple(self._with_text(t) for t in sampled.top))

    def _with_text(self, entry: TokenLogprob, top: tuple[TokenLogprobs, ...] = ()) -> TokenLogprobs:
        tokenizer, token = self._tokenizer, entry.token_id
        raw = tuple(tokenizer.token_bytes(token))
        return TokenLogprobs(token, tokenizer.token_text(token), raw, entry.logprob, top)
