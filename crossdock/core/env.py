"""Every environment variable that crossdock reads, read here and nowhere else."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Env:
    log_level: str
    """CROSSDOCK_LOG_LEVEL: debug, info, warning or error (default info)."""
    api_key: str | None
    """CROSSDOCK_API_KEY: as `--api-key`, without showing it in the process list."""


def read_env() -> Env:
    return Env(
        log_level=os.environ.get("CROSSDOCK_LOG_LEVEL", "info"),
        api_key=os.environ.get("CROSSDOCK_API_KEY") or None,
    )
