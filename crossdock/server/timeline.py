"""A timeline of the next steps over HTTP."""

import asyncio

from starlette.responses import Response, StreamingResponse

from crossdock.metrics.timeline import written
from crossdock.server.border import EngineClient
from crossdock.server.errors import ApiError
from crossdock.server.schema import TraceBody


async def trace(client: EngineClient, body: TraceBody) -> Response:
    """Answers when the steps have run. A client that leaves does not stop it.

    Raises:
        Busy: a trace is under way.
        ApiError: 409 if no step ran in time, or until the server was told to end.
    """
    traces = await asyncio.to_thread(client.traces.record, body.steps, body.timeout_s)
    if not any(trace.intervals for trace in traces):
        raise ApiError(
            409,
            f"no step ran while it traced, {body.timeout_s:g} s at most; send requests meanwhile",
            "timeout_s",
            code="idle",
        )
    return StreamingResponse(written(traces), media_type="application/json")
