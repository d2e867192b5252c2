"""A request, how it is sampled, and what comes back of it."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from crossdock.core.errors import RequestError
from crossdock.core.validate import check_sampling

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names and meanings are vLLM's.

    `logprobs`: number of alternatives to report beside the chosen token (0: the chosen one alone,
    None: nothing). `stop` strings need text and are watched for by the gateway, not by the ranks.

    `min_tokens`: as many tokens come before anything but max_tokens can end the text: the
    end-of-sequence and stop tokens are not drawn until then, and `stop` strings are looked for in
    the text after them (one that begins before is passed over).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Python callers may pass a single stop string, lists, and a dict of biases.
        self._set("stop", lambda s: (s,) if isinstance(s, str) else tuple(s or ()))
        self._set("stop_token_ids", lambda ids: tuple(map(operator.index, ids or ())))
        self._set(
            "logit_bias",
            lambda given: tuple(
                (operator.index(t), float(b))
                for t, b in (given.items() if isinstance(given, dict) else given or ())
            ),
        )
        self._set("top_k", lambda k: 0 if k == -1 else k)
        check_sampling(self)

    def _set(self, name: str, made: Callable[[Any], Any]) -> None:
        given = getattr(self, name)
        try:
            object.__setattr__(self, name, made(given))
        except (TypeError, ValueError):
            expected = {"stop": "strings", "stop_token_ids": "token ids"}.get(
                name, "biases by token"
            )
            raise RequestError(f"{name} must be {expected}, got {given!r}", name) from None

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class Request:
    """One sequence to continue. `emitted` holds tokens already produced elsewhere (resuming).

    `key` seeds the replica choice and the sampling; it is the same wherever the request runs.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    key: int = 0
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int = 0
    """1 for the most likely token."""


BROKEN = -1
"""In a token's place: the logits are not finite."""


class Sampled(NamedTuple):
    """What the sampler chose for one sequence in one step. This and what follows are tuples: one is
    made, and travels, for every token."""

    token_id: int
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


class TokenOutput(NamedTuple):
    """New tokens of one request, 0..n of them, and whether it ended.

    `queue_seconds` (from arrival at the rank to its first scheduling) and `num_cached_tokens` come
    with the first output.
    """

    request_id: str
    tokens: tuple[Sampled, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    error: str | None = None
