"""The ranges of sampling parameters, in one place: the API and Python refuse the same things."""

import math
from typing import TYPE_CHECKING

from crossdock.core.errors import RequestError

if TYPE_CHECKING:
    from crossdock.core.request import SamplingParams

MAX_LOGPROBS = 20


def check_sampling(p: "SamplingParams") -> None:
    """Raises RequestError, naming the field, what was given and what is allowed."""
    _within("n", p.n, 1, 128)
    _within("temperature", p.temperature, 0.0, 100.0)
    _within("top_p", p.top_p, 0.0, 1.0)
    if p.top_p == 0:
        raise RequestError("top_p must be above 0 and at most 1, got 0", "top_p")
    _within("top_k", p.top_k, 0, 2**31 - 1)
    _within("min_p", p.min_p, 0.0, 1.0)
    _within("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", p.repetition_penalty, 0.01, 100.0)
    _within("min_tokens", p.min_tokens, 0, 2**31 - 1)
    if p.seed is not None:
        _within("seed", p.seed, -(2**63), 2**64 - 1)
    if p.max_tokens is not None:
        _within("max_tokens", p.max_tokens, 1, 2**31 - 1)
        if p.min_tokens > p.max_tokens:
            raise RequestError(
                f"min_tokens {p.min_tokens} is more than max_tokens {p.max_tokens}", "min_tokens"
            )
    if p.logprobs is not None:
        _within("logprobs", p.logprobs, 0, MAX_LOGPROBS)
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise RequestError(f"{name} must be True or False, got {getattr(p, name)!r}", name)
    if any(not isinstance(s, str) or not s for s in p.stop):
        raise RequestError("stop must be non-empty strings", "stop")
    for _, bias in p.logit_bias:
        _within("logit_bias", bias, -100.0, 100.0)


def _within(name: str, value: float, low: float, high: float) -> None:
    """Where the bounds are whole numbers, so must the value be."""
    whole = isinstance(low, int)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        kind = "a whole number " if whole else ""
        raise RequestError(f"{name} must be {kind}between {low} and {high}, got {value!r}", name)
