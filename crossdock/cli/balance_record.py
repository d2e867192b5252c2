"""Recording the expert loads of a running server over HTTP."""

from collections.abc import Callable
from time import sleep
from typing import Any

import httpx

from crossdock.core import ConfigError, CrossdockError
from crossdock.core.env import read_env

_TIMEOUT_S = 120.0


def record(
    url: str, windows: int, seconds: float, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """The document of `windows` windows of `seconds` each; those without a token are left out.

    Raises:
        ConfigError: there is no such server, it refuses, or nothing was routed.
    """
    if windows < 1 or not seconds > 0:
        raise ConfigError(
            f"--windows {windows}, --seconds {seconds:g}: expected from 1, and above 0"
        )
    key = read_env().api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=_TIMEOUT_S
    ) as http:
        _ask(http, url, "start")
        document: dict[str, Any] = {}
        found: list[Any] = []
        try:
            for number in range(windows):
                on_progress(f"recording window {number + 1} of {windows}")
                sleep(seconds)
                try:
                    document = _ask(http, url, "dump")
                except ConfigError:
                    if number == windows - 1 and not found:
                        raise
                else:  # a day's windows would be sent again with each, 0.1 MB of a large model
                    found += document["windows"]
                    _ask(http, url, "reset")
        finally:
            _ask(http, url, "stop")
    empty = windows - len(found)
    if empty:
        on_progress(f"{empty} of {windows} windows had no tokens and are left out")
    return {**document, "windows": found}


def _ask(http: httpx.Client, url: str, action: str) -> dict[str, Any]:
    try:
        response = http.post("/v1/experts/load", json={"action": action})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--record {url}: no answer: {error}") from None
    if response.is_success:
        return response.json()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    kind = ConfigError if response.status_code < 500 else CrossdockError
    raise kind(f"--record {url}: {response.status_code}: {message}")
