"""The commands. Heavy rooms are imported inside them, so that help and errors come at once."""

from crossdock.cli.main import main

__all__ = ["main"]
