"""Serving until a signal, a lost rank or a failed start ends it."""

import errno
import gc
import json
import logging
import signal
import socket
import threading
import time
from asyncio import AbstractEventLoop, TimerHandle, Transport, get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from crossdock.core import ServerConfig, UserError
from crossdock.metrics import GatewayMetrics
from crossdock.server.app import create_app
from crossdock.server.border import EngineClient
from crossdock.server.errors import ApiError
from crossdock.server.service import Service

_log = logging.getLogger(__name__)
_INTERRUPT_S = 2.0
"""How long Ctrl-C waits for running requests."""
_FAILED_S = 2.0
"""How long a failed engine is still answered for, so that probes and clients learn of it."""
_HEADERS_S = 20.0
"""How long the head of a request may take to arrive."""


def claim_port(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0 takes any free one. Taken before anything is loaded.

    Raises:
        UserError: the port is taken or may not be used, or the host is not of this machine.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"port must be between 0 and 65535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it; asyncio sets it only where a socket names its protocol. Without it
        # the second small write of a kept connection waits 40 ms for a delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        # The words of create_server repeat the address.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        remedy = "look at --host and --port"
        if error.errno == errno.EADDRINUSE:
            remedy = "end the program that uses it, or choose another --port (0 takes any free one)"
        raise UserError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from None


def run_server(
    engine: EngineClient | Callable[[], EngineClient],
    config: ServerConfig,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT (drained, 0) or until a rank is lost (1).

    `engine` may be a function that starts one: it runs in a thread while /health answers 503, and
    what it raises is raised here. `on_ready` gets the server's URL, in that thread, once requests
    are served. The engine is closed at the end; one that was still starting is the caller's.
    """
    listener = sock if sock is not None else claim_port(config.host, config.port)
    start = engine if callable(engine) else lambda: engine
    app = create_app(None, config, GatewayMetrics())
    settings = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    url = _url(listener)
    server = Server(settings, app.state.service, lambda: server.load(start, on_ready, url))
    server.run(sockets=[listener])
    if server.start_error is not None:
        raise server.start_error
    return server.exit_code


class Server(uvicorn.Server):
    """uvicorn's, with our own way to end: the port answers 503 while running requests finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        on_startup: Callable[[], None] = lambda: None,
    ):
        """`on_startup` runs in a thread of its own, once signals are heard."""
        super().__init__(config)
        self._on_startup = on_startup
        self.service = service
        self.exit_code = 0
        self.start_error: BaseException | None = None
        self._end_at: float | None = None

    def load(
        self,
        start: Callable[[], EngineClient],
        on_ready: Callable[[str], None] | None,
        url: str,
    ) -> None:
        try:
            client = start()
            # As the ranks do: libraries are some 200,000 objects, and each walk through them would
            # keep all answers waiting for 100 ms.
            gc.collect()
            gc.freeze()
            self.service.attach(client)
            if on_ready is not None:
                on_ready(url)
        except BaseException as error:
            self.start_error = error

    def drain(self, limit_s: float) -> None:
        """Takes no new requests; ends when the running ones have, at the latest in `limit_s`."""
        end_at = time.monotonic() + limit_s
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)
        self.service.draining = True
        if self.service.client is not None:
            self.service.client.traces.finish()  # it may wait for steps that do not come any more

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        threading.Thread(target=self._on_startup, name="engine-start", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service.client is not None:
            # Threads that wait for it, as for a move of experts, would hold up the end.
            threading.Thread(target=self.service.client.close, name="engine-close").start()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        await super().on_tick(counter)
        service, now = self.service, time.monotonic()
        if self.start_error is not None:
            return True
        if service.failure is not None and self.exit_code == 0:
            _log.error("the engine has failed: %s", service.failure)
            self.exit_code = 1
            service.end_all(service.failure, "engine_error")
            self._end_at = now + _FAILED_S
        drained = service.draining and not service.open and self.exit_code == 0
        if drained or (self._end_at is not None and now >= self._end_at):
            service.end_all("the server is shutting down", "draining")
            return True
        return self.should_exit

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, self.service.config.drain_s)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, _INTERRUPT_S)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)

    def _on_signal(self, limit_s: float) -> None:
        again = self.service.draining and limit_s <= _INTERRUPT_S
        running = len(self.service.open)
        if running and not again:
            _log.info("ending: up to %.0f s for %d running requests", limit_s, running)
        self.drain(0.0 if again else limit_s)


class _Protocol(H11Protocol):
    """uvicorn's, with an answer in JSON to what is no HTTP, and a limit for slow heads."""

    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._time_head()

    def send_400_response(self, msg: str) -> None:
        # In the middle of an answer there is nothing to say any more.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, msg).body()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _time_head(self) -> None:
        loop: AbstractEventLoop = self.loop
        self._head_timer = loop.call_later(_HEADERS_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
