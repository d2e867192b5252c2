"""The routes. Bodies are read here by hand: their limit holds while they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from crossdock import __version__
from crossdock.core import CrossdockError, ServerConfig, UserError
from crossdock.metrics import GatewayMetrics
from crossdock.metrics.exposition import CONTENT_TYPE
from crossdock.server.answer import Answer
from crossdock.server.border import EngineClient
from crossdock.server.errors import JSON, ApiError, from_engine
from crossdock.server.experts import rebalance, record_loads
from crossdock.server.gate import Gate
from crossdock.server.intake import chat_job, check_ids, completion_job, encode, render
from crossdock.server.mailbox import Mailbox
from crossdock.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadBody,
    RebalanceBody,
    TokenizeBody,
    TraceBody,
    parse,
)
from crossdock.server.service import Service, read_json
from crossdock.server.timeline import trace
from crossdock.server.trace import Trace

_SAMPLE_S = 10.0


def create_app(
    client: EngineClient | None, config: ServerConfig, metrics: GatewayMetrics
) -> FastAPI:
    """The whole HTTP side over one engine. An engine that comes later is given to
    `app.state.service.attach`; until then requests and /health are answered with 503."""
    service = Service(client, config, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.mailbox = Mailbox(asyncio.get_running_loop())
        sampler = asyncio.create_task(service.sample_metrics(_SAMPLE_S))
        yield
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler

    app = FastAPI(
        lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    for method, path, handler in _ROUTES:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(CrossdockError, _engine_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_middleware(
        Gate,
        api_key=config.api_key,
        metrics=metrics,
        routes=frozenset(path for _, path, _ in _ROUTES),
    )
    return app


async def completions(request: Request) -> Response:
    service, client, body = await _begin(request, CompletionBody)
    job = await completion_job(body, client, service)
    service.ready()
    return Answer(service, client, job, _trace(request))


async def chat_completions(request: Request) -> Response:
    service, client, body = await _begin(request, ChatBody)
    job = await chat_job(body, client, service)
    service.ready()
    return Answer(service, client, job, _trace(request))


async def tokenize(request: Request) -> Response:
    _, client, body = await _begin(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if body.prompt is not None:
        ids = await encode(client.tokenizer, body.prompt, body.add_special_tokens)
    else:
        ids = await render(client.tokenizer, body.messages or [], body.chat_template_kwargs)
    return JSON({"count": len(ids), "max_model_len": client.max_model_len, "tokens": list(ids)})


async def detokenize(request: Request) -> Response:
    _, client, body = await _begin(request, DetokenizeBody)
    check_ids(body.tokens, client, "tokens")
    text = await asyncio.to_thread(client.tokenizer.decode, body.tokens, False)
    return JSON({"prompt": text})


async def expert_load(request: Request) -> Response:
    _, client, body = await _begin(request, LoadBody)
    return JSON(await record_loads(client, body))


async def expert_rebalance(request: Request) -> Response:
    _, client, body = await _begin(request, RebalanceBody, optional=True)
    return JSON(await rebalance(client, body))


async def trace_steps(request: Request) -> Response:
    _, client, body = await _begin(request, TraceBody, optional=True)
    return await trace(client, body)


async def models(request: Request) -> Response:
    service = _service(request)
    return JSON({"object": "list", "data": [_model_card(service, service.ready())]})


async def model(request: Request) -> Response:
    service = _service(request)
    client = service.ready()
    service.check_model(request.path_params["name"], client)
    return JSON(_model_card(service, client))


async def health(request: Request) -> Response:
    word, why = _service(request).status()
    if why is None:
        return JSON({"status": word})
    error = ApiError(503, why, code=word)
    return JSON({"status": word, **error.body()}, 503, {"Retry-After": "5"})


async def version(request: Request) -> Response:
    client = _service(request).client
    engine = (
        {} if client is None else {"ranks": client.config.ranks, "device": client.config.device}
    )
    return JSON({"version": __version__, **engine})


async def exposition(request: Request) -> Response:
    service = _service(request)
    text = await asyncio.to_thread(service.metrics.expose)
    return Response(text, headers={"content-type": CONTENT_TYPE})


_ROUTES = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/experts/load", expert_load),
    ("POST", "/v1/experts/rebalance", expert_rebalance),
    ("POST", "/v1/trace", trace_steps),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/version", version),
    ("GET", "/metrics", exposition),
)


async def _begin(
    request: Request, cls: type[Body], optional: bool = False
) -> tuple[Service, EngineClient, Body]:
    """What all bodies share: is the engine there, is it JSON, do fields and model fit."""
    service = _service(request)
    client = service.ready()
    values = await read_json(request, int(service.config.max_body_mib * 2**20), optional)
    try:
        body = parse(cls, values)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    service.check_model(getattr(body, "model", None), client)
    return service, client, body


def _service(request: Request) -> Service:
    return request.app.state.service


def _trace(request: Request) -> Trace:
    return request.scope["crossdock.trace"]


def _model_card(service: Service, client: EngineClient) -> dict[str, Any]:
    return {
        "id": service.model_name(client),
        "object": "model",
        "created": service.started,
        "owned_by": "crossdock",
        "max_model_len": client.max_model_len,
        "vocab_size": client.spec.vocab_size,
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _engine_error(request: Request, error: Exception) -> Response:
    word, why = _service(request).status()
    if why is not None and not isinstance(error, UserError):  # the engine has ended for a reason
        return _answer(request, ApiError(503, why, code=word, headers={"Retry-After": "5"}))
    return _answer(request, from_engine(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        routes = sorted({route.replace(":path}", "}") for _, route, _ in _ROUTES})
        message = f"there is no {path}; the routes are {', '.join(routes)}"
    elif error.status_code == 405:
        allowed = ", ".join(sorted({m for m, p, _ in _ROUTES if p == request.url.path}))
        message = f"{path} takes {allowed or 'another method'}, not {request.method}"
    else:
        message = str(error.detail)
    return _answer(request, ApiError(error.status_code, message, headers=error.headers))


def _answer(request: Request, error: ApiError) -> Response:
    _trace(request).error = error.message
    return error.response()


async def _left(request: Request, error: Exception) -> Response:
    """The client left in the middle of its body: this is for the log alone."""
    return Response(status_code=499)
