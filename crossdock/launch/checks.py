"""What of a request an engine refuses before it starts."""

from collections.abc import Sequence
from dataclasses import replace

from crossdock.core import RequestError, SamplingParams


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """`params` with its `max_tokens` set, at most to what the context has room for.

    Raises:
        RequestError: empty prompt, ids outside the vocabulary, or too long for the model.
    """
    if type(params) is not SamplingParams:  # no other class travels
        raise RequestError(f"expected SamplingParams, got {params!r}", "params")
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(t for t in prompt if not 0 <= t < vocab_size)
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}", "prompt")
    room = max_model_len - len(prompt)
    wanted = params.max_tokens if params.max_tokens is not None else 1
    if room < wanted:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and {wanted} are to be generated, "
            f"{len(prompt) + wanted} in all; the context holds {max_model_len}",
            "max_tokens" if room > 0 else "prompt",
        )
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias names token {token}; the vocabulary has {vocab_size}", "logit_bias"
            )
    return replace(params, max_tokens=room) if params.max_tokens is None else params
