"""Around every request: its id, the key, its log line, and an answer whatever goes wrong."""

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdock.metrics import GatewayMetrics
from crossdock.server.errors import ApiError
from crossdock.server.trace import Trace, request_id

_log = logging.getLogger(__name__)
_OPEN = {("GET", "/health"), ("GET", "/metrics"), ("GET", "/version")}
"""Asked by probes and scrapers, without the key and without a log line above debug."""


class Gate:
    """ASGI middleware, the outermost."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        metrics: GatewayMetrics,
        routes: frozenset[str],
    ):
        self._app, self._metrics, self._routes = app, metrics, routes
        self._key = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        trace = Trace(
            request_id(None if given is None else given.decode("latin-1")),
            scope["method"],
            scope["path"],
        )
        scope["crossdock.trace"] = trace
        send = _stamped(send, trace)
        try:
            if self._key is None or (trace.method, trace.path) in _OPEN or self._admits(headers):
                await self._app(scope, receive, send)
            else:
                await _unauthorized(b"authorization" in headers)(scope, receive, send)
        except Exception:
            _log.exception("request %s failed", trace.id)
            if trace.status is None:
                error = ApiError(500, f"internal error; the log has it under id {trace.id}")
                await error.response()(scope, receive, send)
        finally:
            if trace.status is None:
                trace.status = 499  # nothing was sent: the client left before
            self._record(trace)

    def _admits(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        right = hmac.compare_digest(_digest(key.strip()), self._key or b"")
        return right and scheme.lower() == b"bearer"

    def _record(self, trace: Trace) -> None:
        route = trace.path if trace.path in self._routes else "other"
        self._metrics.response(route, trace.status or 0)
        quiet = (trace.method, trace.path) in _OPEN
        _log.log(logging.DEBUG if quiet else logging.INFO, trace.line())


def _stamped(send: Send, trace: Trace) -> Callable[[Message], Awaitable[None]]:
    """`send` that adds the id to the response's headers and notes its status."""

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            stamp = (b"x-request-id", trace.id.encode())
            message = {**message, "headers": [*message.get("headers", []), stamp]}
        await send(message)

    return stamped


def _unauthorized(given: bool) -> ASGIApp:
    what = "is wrong" if given else "is missing"
    return ApiError(
        401,
        f"the API key {what}; send the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    ).response()


def _digest(key: bytes) -> bytes:
    # Of equal length, so that the comparison tells nothing about the key's.
    return hashlib.sha256(key).digest()
