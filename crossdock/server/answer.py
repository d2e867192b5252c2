"""The life of one request that generates: submit, take updates, send, and leave nothing running."""

import asyncio
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crossdock.server.border import EngineClient
from crossdock.server.errors import JSON, ApiError
from crossdock.server.formats import ChatFormat, Choice, CompletionFormat, Format
from crossdock.server.intake import Job
from crossdock.server.mailbox import Inbox, Letter
from crossdock.server.service import Service
from crossdock.server.trace import Trace

_encode = json.JSONEncoder(separators=(",", ":")).encode
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Watches the connection from the start: a client that leaves stops its request at once.

    Raises ApiError as long as nothing has been sent; later errors become an event of the stream.
    """

    def __init__(self, service: Service, client: EngineClient, job: Job, trace: Trace):
        super().__init__()
        self._service, self._client, self._job, self._trace = service, client, job, trace
        self._format: Format = ChatFormat() if job.chat else CompletionFormat()
        self._id = self._format.id_prefix + trace.id
        self._choices: dict[tuple[int, int], Choice] = {}
        for prompt, (_, params) in enumerate(job.prompts):
            for index in range(params.n):
                self._choices[prompt, index] = Choice(len(self._choices), prompt)
        self._left = len(self._choices)
        self._want_logprobs = job.prompts[0][1].logprobs is not None
        trace.prompt_tokens = job.prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = Inbox()
        submitted: list[str] = []
        self._service.open.add(inbox)
        watcher = asyncio.create_task(_watch(receive, inbox))
        try:
            self._submit(inbox, submitted)
            if self._job.stream:
                await self._stream(inbox, send)
            else:
                await self._collect(inbox, scope, receive, send)
        finally:
            watcher.cancel()
            self._service.open.discard(inbox)
            if self._left:
                self._give_up(submitted, "abort" if inbox.gone else "error")

    def _submit(self, inbox: Inbox, submitted: list[str]) -> None:
        prompts = self._job.prompts
        self._service.check_room(len(prompts), prompts[0][1].n, self._client)
        mailbox = self._service.mailbox
        assert mailbox is not None
        for prompt, (ids, params) in enumerate(prompts):
            # The client's own x-request-id may come twice; the engine's ids must not.
            request_id = f"{self._id}-{self._service.next_number()}"
            self._client.submit(request_id, ids, params, partial(mailbox.post, inbox, prompt))
            submitted.append(request_id)

    def _give_up(self, submitted: Sequence[str], reason: str) -> None:
        for request_id in submitted:
            self._client.abort(request_id)
        now = time.perf_counter()
        for choice in self._choices.values():
            if choice.finish_reason is None:
                self._service.metrics.finished(reason, now - self._trace.started)

    # -- both ways -------------------------------------------------------------------------------

    def _absorb(self, letter: Letter) -> Choice | None:
        """Counts an update in; its choice, or None if that has ended already."""
        update = letter.update
        choice = self._choices[letter.prompt, update.index]
        if choice.finish_reason is not None:
            return None
        if update.error is not None or update.finish_reason in ("error", "abort"):
            raise ApiError(
                500 if self._client.failure is None else 503,
                update.error or "the engine ended this request",
                code="engine_error",
            )
        self._measure(letter, choice, len(update.token_ids))
        choice.cached_tokens = max(choice.cached_tokens, update.num_cached_tokens)
        if update.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_reason
            self._left -= 1
            self._service.metrics.finished(update.finish_reason, letter.at - self._trace.started)
        return choice

    def _measure(self, letter: Letter, choice: Choice, tokens: int) -> None:
        if not tokens:
            return
        choice.output_tokens += tokens
        self._trace.output_tokens += tokens
        if choice.last_at is None:
            waited = letter.at - self._trace.started
            self._service.metrics.first_token(waited, letter.update.queue_seconds)
            if self._trace.ttft is None:
                self._trace.ttft = waited
        else:
            self._service.metrics.tokens(letter.at - choice.last_at, tokens)
        choice.last_at = letter.at

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._trace.created,
            "model": self._service.model_name(self._client),
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._job.prompt_tokens, self._trace.output_tokens
        cached = [0] * len(self._job.prompts)
        for choice in self._choices.values():
            cached[choice.prompt] = max(cached[choice.prompt], choice.cached_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }

    # -- in one piece ----------------------------------------------------------------------------

    async def _collect(self, inbox: Inbox, scope: Scope, receive: Receive, send: Send) -> None:
        while self._left:
            letters = await inbox.take()
            if inbox.gone:
                self._trace.status = 499
                return
            for letter in letters:
                choice = self._absorb(letter)
                if choice is not None:
                    choice.text.append(letter.update.text)
                    choice.logprobs.extend(letter.update.logprobs)
            if inbox.cut is not None and self._left:
                raise inbox.cut
        choices = [self._format.whole(c, self._want_logprobs) for c in self._choices.values()]
        body = {**self._head(self._format.kind), "choices": choices, "usage": self._usage()}
        await JSON(body)(scope, receive, send)

    # -- as events -------------------------------------------------------------------------------

    async def _stream(self, inbox: Inbox, send: Send) -> None:
        before = "data: " + _encode(self._head(self._format.chunk_kind))[:-1] + ',"choices":['
        after = '],"usage":null}\n\n' if self._job.usage.include_usage else "]}\n\n"
        started = False
        error: ApiError | None = None
        while self._left and error is None:
            letters = await inbox.take()
            if inbox.gone:
                self._trace.status = 499
                return
            events: list[str] = []
            try:
                for letter in letters:
                    for values in self._chunks(letter):
                        if self._job.usage.continuous_usage_stats:
                            after = f'],"usage":{_encode(self._usage())}}}\n\n'
                        events.append(before + _encode(values) + after)
                if inbox.cut is not None and self._left:
                    raise inbox.cut
            except ApiError as failed:
                if not started:
                    raise
                error, self._trace.error = failed, failed.message
            if not started:
                # Only now: an error before the first token still gets its own status.
                started = True
                head = {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
                await send(head)
            if events:
                body = "".join(events).encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self._last_events(error)})

    def _chunks(self, letter: Letter) -> list[dict[str, Any]]:
        opening = self._choices[letter.prompt, letter.update.index].last_at is None
        choice = self._absorb(letter)
        if choice is None:
            return []
        update = letter.update
        chunks = []
        if opening and choice.last_at is not None:
            first = self._format.opening(choice)
            chunks += [first] if first is not None else []
        tells = update.text or choice.finish_reason or (self._want_logprobs and update.logprobs)
        if tells:  # no text comes of a token that ends in the middle of a character
            chunks.append(self._format.delta(choice, update, self._want_logprobs))
        return chunks

    def _last_events(self, error: ApiError | None) -> bytes:
        events = ""
        if error is not None:
            events = f"data: {_encode(error.body())}\n\n"
        elif self._job.usage.include_usage:
            head = self._head(self._format.chunk_kind)
            events = f"data: {_encode({**head, 'choices': [], 'usage': self._usage()})}\n\n"
        return (events + "data: [DONE]\n\n").encode()


async def _watch(receive: Receive, inbox: Inbox) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.disconnect()
