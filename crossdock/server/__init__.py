"""The OpenAI-compatible HTTP side of an engine. HTTP lives here and nowhere else."""

from crossdock.server.app import create_app
from crossdock.server.border import EngineClient
from crossdock.server.run import claim_port, run_server

__all__ = ["EngineClient", "claim_port", "create_app", "run_server"]
