"""The Python face: `LLM(model, ranks=4).generate(prompts, params)`."""

import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any

from crossdock.core import (
    CrossdockError,
    EngineConfig,
    RequestError,
    SamplingParams,
    check_settings,
)
from crossdock.launch.opened import Submission
from crossdock.launch.output import TokenLogprobs, Update
from crossdock.launch.start import launch

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds from the submission; `queue` is the wait at the rank before the first step."""

    ttft: float
    e2e: float
    queue: float
    num_cached_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics


@dataclass
class _Gathering:
    """The updates of one request, until all its choices have ended."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    started: float = field(default_factory=time.perf_counter)
    updates: list[list[Update]] = field(default_factory=list)
    first: float = 0.0
    ended: float = 0.0
    open: int = 0


class LLM:
    """An engine with `ranks` processes on this host. Close it, or use it in a `with`.

    Args:
        model: a Hugging Face directory or id.
        ranks: expert-parallel ranks; each holds E / ranks experts and its share of the requests.
        settings: fields of `EngineConfig`.
    """

    def __init__(self, model: str, ranks: int = 1, **settings: Any):
        check_settings(settings)
        self.client = launch(EngineConfig(model=str(model), ranks=ranks, **settings))
        self._ids = itertools.count()
        # Ends the ranks when this object is collected or the interpreter exits.
        self._finalizer = weakref.finalize(self, self.client.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; outputs come in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one for all, or one per prompt; None: the model's own (`sampling_defaults`).

        Raises:
            RequestError: a prompt or a parameter is invalid; none of them is left running.
            CrossdockError: the engine failed.
        """
        items = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            every = [params or SamplingParams(**self.client.sampling_defaults)] * len(items)
        elif isinstance(params, list | tuple) and all(
            isinstance(p, SamplingParams) for p in params
        ):
            every = list(params)
        else:
            raise RequestError(
                f"expected SamplingParams or a list of them, got {params!r}", "params"
            )
        if len(every) != len(items):
            raise RequestError(f"{len(items)} prompts but {len(every)} sampling params", "params")
        encoded = [self._encode(item) for item in items]
        return self._run(
            [
                _Gathering(text, ids, each, open=each.n)
                for (text, ids), each in zip(encoded, every, strict=True)
            ]
        )

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, through the model's chat template, which is given
        `chat_template_kwargs` too."""
        switches = chat_template_kwargs or {}
        ids = self.client.tokenizer.apply_chat_template(list(messages), **switches)
        return self.generate([ids], params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.client.tokenizer.encode(prompt))
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt is a text or token ids, got {prompt!r}", "prompt")
        return None, tuple(prompt)

    def _run(self, requests: list[_Gathering]) -> list[RequestOutput]:
        changed = threading.Condition()
        ids = [f"llm-{next(self._ids)}" for _ in requests]

        def listen(request: _Gathering, update: Update) -> None:
            with changed:
                now = time.perf_counter()
                request.first = request.first or (now if update.token_ids else 0.0)
                request.updates[update.index].append(update)
                if update.finish_reason is not None:
                    request.open -= 1
                    request.ended = now
                    changed.notify_all()

        submissions = []
        for name, request in zip(ids, requests, strict=True):
            request.updates = [[] for _ in range(request.params.n)]
            on_update = partial(listen, request)
            submissions.append(Submission(name, request.prompt_ids, request.params, on_update))
        try:
            self.client.submit_all(submissions)
            with changed:
                changed.wait_for(lambda: all(r.open == 0 for r in requests))
        except BaseException:
            for name in ids:
                self.client.abort(name)
            raise
        if self.client.failure is not None:
            raise CrossdockError(self.client.failure)
        return [_output(name, request) for name, request in zip(ids, requests, strict=True)]

    def close(self) -> None:
        """Ends all rank processes."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or several: a list, tuple or array of anything but integers."""
    several = hasattr(prompts, "__iter__") and not isinstance(prompts, str | bytes | dict)
    items = list(prompts) if several else [prompts]
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def _output(name: str, request: _Gathering) -> RequestOutput:
    updates = [u for choice in request.updates for u in choice]
    failed = next((u.error for u in updates if u.finish_reason == "error"), None)
    if failed is not None:
        raise CrossdockError(f"request {name}: {failed}")
    metrics = RequestMetrics(
        ttft=request.first - request.started if request.first else 0.0,
        e2e=request.ended - request.started,
        queue=max(u.queue_seconds for u in updates),
        num_cached_tokens=max(u.num_cached_tokens for u in updates),
    )
    return RequestOutput(
        name,
        request.prompt,
        request.prompt_ids,
        tuple(
            CompletionOutput(
                index,
                "".join(u.text for u in choice),
                tuple(t for u in choice for t in u.token_ids),
                tuple(p for u in choice for p in u.logprobs)
                if request.params.logprobs is not None
                else None,
                choice[-1].finish_reason or "abort",
                choice[-1].stop_reason,
            )
            for index, choice in enumerate(request.updates)
        ),
        metrics,
    )
