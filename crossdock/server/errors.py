"""Errors as OpenAI's clients know them: a JSON object and a status."""

import json
from collections.abc import Mapping

from starlette.responses import Response

from crossdock.core import Busy, RankLost, RequestError, UserError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer that is no success. `param`: the field at fault, as the API calls it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return JSON(self.body(), self.status, self.headers)


class JSON(Response):
    """ASCII-only JSON: lone surrogates that came in can go out."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def from_engine(error: Exception) -> ApiError:
    """What an error of the engine's client means to an HTTP client."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, Busy):
        return ApiError(409, str(error), code="busy", headers={"Retry-After": "1"})
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, RankLost):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    return ApiError(500, str(error), code="engine_error")
