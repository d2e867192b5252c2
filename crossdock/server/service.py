"""What handlers share: the engine once it is there, and who is being served."""

import asyncio
import itertools
import json
import logging
import time
from typing import Any

from starlette.requests import Request

from crossdock.core import EngineConfig, ServerConfig
from crossdock.metrics import GatewayMetrics
from crossdock.metrics.exposition import Engine
from crossdock.server.border import EngineClient
from crossdock.server.errors import ApiError
from crossdock.server.mailbox import Inbox, Mailbox

_log = logging.getLogger(__name__)
_LEAST_QUEUE = 512
_BODY_S = 30.0
"""How long a body may take to arrive."""


class Service:
    """One per app; lives on the event loop."""

    def __init__(self, client: EngineClient | None, config: ServerConfig, metrics: GatewayMetrics):
        self.config, self.metrics = config, metrics
        self.started = int(time.time())
        self.draining = False
        self.open: set[Inbox] = set()
        self.mailbox: Mailbox | None = None
        self.client: EngineClient | None = None
        self._numbers = itertools.count()
        if client is not None:
            self.attach(client)

    def attach(self, client: EngineClient) -> None:
        """The engine is ready; called once, from any thread."""
        self.metrics.attach(
            Engine(
                client.snapshots,
                client.config.ranks,
                client.spec.moe.top_k,
                client.config.load_window_tokens,
                client.balancer.totals,
                client.config.altering,
                client.ceilings,
            )
        )
        self.client = client

    @property
    def failure(self) -> str | None:
        return None if self.client is None else self.client.failure

    def status(self) -> tuple[str, str | None]:
        """`(word, why)`: ok, loading, draining or failed; why is None when ok."""
        if self.failure is not None:
            return "failed", self.failure
        if self.draining:
            return "draining", "the server is shutting down"
        if self.client is None:
            return "loading", "the model is still loading"
        return "ok", None

    def ready(self) -> EngineClient:
        """Raises ApiError 503 unless requests can be served."""
        word, why = self.status()
        client = self.client
        if why is not None or client is None:
            raise ApiError(503, why or word, code=word, headers={"Retry-After": "5"})
        return client

    def model_name(self, client: EngineClient) -> str:
        return self.config.served_model_name or client.model_name

    def check_model(self, asked: str | None, client: EngineClient) -> None:
        name = self.model_name(client)
        if asked is not None and asked != name:
            raise ApiError(
                404, f"model {asked!r} is not served here; {name!r} is", "model", "model_not_found"
            )

    def check_room(self, prompts: int, n: int, client: EngineClient) -> None:
        """Of one request: `n` sequences for each of its prompts.

        Raises:
            ApiError: 400 if that is more than is ever taken, 429 if there is no room now.
        """
        limit, sequences = self._most_open(client.config), prompts * n
        if sequences > limit:
            param = "n" if n > limit else "prompt"
            raise ApiError(
                400,
                f"{param}: {sequences} sequences at once, at most {limit} are taken "
                "(setting max_queue)",
                param,
            )
        if client.num_open() + sequences > limit:
            raise ApiError(
                429,
                f"the queue of {limit} sequences has no room for {sequences} more; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def _most_open(self, engine: EngineConfig) -> int:
        most_running = engine.max_num_seqs * engine.groups
        return self.config.max_queue or max(_LEAST_QUEUE, 2 * most_running)

    def next_number(self) -> int:
        return next(self._numbers)

    def end_all(self, why: str, code: str) -> None:
        """Ends every open request with an error 503."""
        for inbox in self.open:
            inbox.end(ApiError(503, why, code=code))

    async def sample_metrics(self, every_s: float) -> None:
        """Reads the ranks' metrics while requests run; idle ranks are left asleep."""
        was_open = False
        while True:
            await asyncio.sleep(every_s)
            if self.open or was_open:
                try:
                    await asyncio.to_thread(self.metrics.sample)
                except Exception:  # of the client; serving goes on without figures
                    _log.exception("the ranks' metrics could not be read")
            was_open = bool(self.open)


async def read_json(request: Request, max_bytes: int, optional: bool = False) -> Any:
    """The body, within the limit whether its length is announced or not. `optional`: none is {}.

    Raises:
        ApiError: 400, 408, 413 or 415.
        starlette.requests.ClientDisconnect: it never came whole.
    """
    sent = request.headers.get("content-length", "0") != "0"
    if optional and not sent and "transfer-encoding" not in request.headers:
        return {}
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"content-type is {kind[:80]!r}; send JSON with 'content-type: application/json'"
        )
    try:
        async with asyncio.timeout(_BODY_S):
            data = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {_BODY_S:.0f} s", headers={"Connection": "close"}
        ) from None
    try:
        return json.loads(data)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    too_large = announced.isdigit() and int(announced) > max_bytes
    chunks: list[bytes] = []
    size = 0
    # A client that announced too much still gets to send a while: cut off in the middle of its
    # sending it would see a reset connection instead of the answer. One that asks first does not.
    expects = request.headers.get("expect", "").lower() == "100-continue"
    if not (too_large and expects):
        async for chunk in request.stream():
            size += len(chunk)
            too_large = too_large or size > max_bytes
            if not too_large:
                chunks.append(chunk)
            elif size > 8 * max_bytes:
                break
    if too_large:
        raise ApiError(
            413,
            f"the body is over the limit of {max_bytes} bytes (setting max_body_mib)",
            headers={"Connection": "close"},
        )
    return b"".join(chunks)
