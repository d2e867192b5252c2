"""From a request's body to token ids and sampling parameters, or a refusal that names the field."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossdock.core import RequestError, SamplingParams
from crossdock.server.border import EngineClient, Tokenizer
from crossdock.server.errors import ApiError
from crossdock.server.schema import ChatBody, CompletionBody, Message, StreamOptions
from crossdock.server.service import Service

_INLINE_CHARS = 2000
"""Longer texts are tokenized in a thread, so that the event loop goes on serving."""
_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine; `prompts` are its prompts' ids and parameters."""

    chat: bool
    prompts: tuple[tuple[tuple[int, ...], SamplingParams], ...]
    stream: bool
    usage: StreamOptions

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.prompts)


async def completion_job(body: CompletionBody, client: EngineClient, service: Service) -> Job:
    params = _sampling(body, client, body.max_tokens, body.logprobs)
    texts_or_ids = _prompts(body.prompt)
    service.check_room(len(texts_or_ids), params.n, client)
    prompts = []
    for prompt in texts_or_ids:
        ids = await encode(client.tokenizer, prompt) if isinstance(prompt, str) else prompt
        prompts.append(_fit(ids, params, client, "prompt", "max_tokens", _COMPLETION_TOKENS))
    return Job(False, tuple(prompts), body.stream, _usage(body))


async def chat_job(body: ChatBody, client: EngineClient, service: Service) -> Job:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400,
            f"max_completion_tokens {body.max_completion_tokens} and max_tokens {body.max_tokens} "
            "are both given; leave one out",
            "max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    field = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    renamed = {"max_tokens": field, "logprobs": "top_logprobs"}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _sampling(body, client, limit, logprobs, renamed)
    service.check_room(1, params.n, client)
    ids = await render(client.tokenizer, body.messages, body.chat_template_kwargs)
    prompt = _fit(ids, params, client, "messages", field, client.max_model_len)
    return Job(True, (prompt,), body.stream, _usage(body))


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def render(
    tokenizer: Tokenizer, messages: Sequence[Message], switches: Mapping[str, Any]
) -> list[int]:
    """`switches`: variables of the template's own, as `enable_thinking`."""
    rendered = [message.to_template() for message in messages]
    # Always in a thread: a template is a program that came with the checkpoint.
    return await asyncio.to_thread(tokenizer.apply_chat_template, rendered, **switches)


def check_ids(ids: Sequence[int], client: EngineClient, param: str) -> None:
    vocab = client.spec.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise ApiError(400, f"{param}: token id {bad} is outside the vocabulary of {vocab}", param)


def _usage(body: CompletionBody | ChatBody) -> StreamOptions:
    options = body.stream_options
    if options is None:
        return StreamOptions()
    if not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise ApiError(400, "continuous_usage_stats needs include_usage: true", "stream_options")
    return options


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The four forms of OpenAI's `prompt` as a list of texts and lists of ids."""
    if isinstance(prompt, str):
        return [_valid_text(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return [_valid_text(item) for item in prompt]
        if all(isinstance(item, list) and item for item in prompt) and all(
            type(token) is int for item in prompt for token in item
        ):
            return prompt
    raise ApiError(
        400,
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        "them, none of them empty",
        "prompt",
    )


def _valid_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "prompt holds a lone surrogate: not valid Unicode", "prompt") from None
    return text


def _sampling(
    body: CompletionBody | ChatBody,
    client: EngineClient,
    max_tokens: int | None,
    logprobs: int | None,
    renamed: dict[str, str] | None = None,
) -> SamplingParams:
    """`renamed`: what a parameter is called in this endpoint's body, where that differs."""

    def said(name: str) -> Any:
        value = getattr(body, name)
        return value if name in body.model_fields_set else client.sampling_defaults.get(name, value)

    try:
        bias = tuple((int(token), value) for token, value in body.logit_bias.items())
    except ValueError:
        raise ApiError(400, "logit_bias: keys must be token ids", "logit_bias") from None
    try:
        return SamplingParams(
            n=body.n,
            temperature=said("temperature"),
            top_p=said("top_p"),
            top_k=said("top_k"),
            min_p=said("min_p"),
            seed=body.seed,
            repetition_penalty=said("repetition_penalty"),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=bias,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            skip_special_tokens=body.skip_special_tokens,
        )
    except RequestError as error:
        param = (renamed or {}).get(error.param or "", error.param)
        message = str(error).replace(error.param or "", param or "", 1)
        raise ApiError(400, message, param) from None


def _fit(
    ids: Sequence[int],
    params: SamplingParams,
    client: EngineClient,
    prompt_field: str,
    limit_field: str,
    default_tokens: int,
) -> tuple[tuple[int, ...], SamplingParams]:
    """The prompt with its number of tokens to generate settled."""
    check_ids(ids, client, prompt_field)
    check_ids([token for token, _ in params.logit_bias], client, "logit_bias")
    check_ids(params.stop_token_ids, client, "stop_token_ids")
    context = client.max_model_len
    room = context - len(ids)
    if not ids:
        raise ApiError(400, f"{prompt_field} is empty", prompt_field)
    if params.max_tokens is None and room >= 1:
        limit = min(default_tokens, room)
        if params.min_tokens > limit:
            raise ApiError(
                400,
                f"min_tokens {params.min_tokens} is more than the {limit} to come",
                "min_tokens",
            )
        return tuple(ids), replace(params, max_tokens=limit)
    wanted = params.max_tokens or 1
    if wanted > room:
        raise ApiError(
            400,
            f"the context holds {context} tokens; the prompt has {len(ids)} and {limit_field} asks "
            f"for {wanted}, {len(ids) + wanted} in all",
            limit_field if room >= 1 else prompt_field,
            "context_length_exceeded",
        )
    return tuple(ids), params
