"""Starting rank processes, talking to them, and the Python face of an engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossdock.launch.client import EngineClient
    from crossdock.launch.llm import LLM, CompletionOutput, RequestOutput
    from crossdock.launch.output import TokenLogprobs, Update
    from crossdock.launch.start import launch

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineClient",
    "RequestOutput",
    "TokenLogprobs",
    "Update",
    "launch",
]

_HOME = {
    "EngineClient": "client",
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
    "TokenLogprobs": "output",
    "Update": "output",
    "launch": "start",
}


def __getattr__(name: str) -> Any:
    # Lazily: a rank process imports this package too and needs none of the gateway's side.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"crossdock.launch.{_HOME[name]}"), name)
    raise AttributeError(f"module 'crossdock.launch' has no attribute {name!r}")
