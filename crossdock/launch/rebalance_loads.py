"""Recording expert loads of a running engine, window by window."""

import threading
from typing import Any, Protocol

import numpy as np

from crossdock.balance import Loads
from crossdock.control import Reading, Window
from crossdock.core import ConfigError, Placement


class Source(Protocol):
    """What is asked of an engine's client."""

    @property
    def placement(self) -> Placement: ...
    @property
    def expert_bytes(self) -> int: ...
    def reading(self) -> Reading: ...


class LoadRecording:
    """Thread-safe."""

    def __init__(self, source: Source):
        self._source = source
        self._lock = threading.Lock()
        self._windows: list[Window] = []
        self._base: Reading | None = None

    def start(self) -> None:
        """Begins the first window; what was recorded before is dropped."""
        with self._lock:
            self._windows, self._base = [], self._source.reading()

    def stop(self) -> None:
        """Closes the open window. What is recorded can still be dumped."""
        with self._lock:
            self._close()
            self._base = None

    def reset(self) -> None:
        """Drops what is recorded; a recording that runs begins anew."""
        with self._lock:
            self._windows = []
            if self._base is not None:
                self._base = self._source.reading()

    def dump(self) -> dict[str, Any]:
        """Closes the open window, begins the next one, and gives all of them as the document that
        `balance.parse_loads` reads. A window in which nothing was routed is left out.

        Raises:
            ConfigError: nothing is recorded.
        """
        with self._lock:
            self._close()
            if not self._windows:
                why = "nothing was routed since it started; send requests first"
                if self._base is None:
                    why = 'it was not started; {"action": "start"} does'
                raise ConfigError(f"the recording of expert loads is empty: {why}")
            return Loads(
                np.stack([window.load_LE for window in self._windows]),
                np.array([max(1, window.steps) for window in self._windows]),
                self._source.placement.slot_expert_LP,
                self._source.expert_bytes,
            ).document()

    def state(self) -> dict[str, Any]:
        """`recording`, `windows` closed so far."""
        with self._lock:
            return {"recording": self._base is not None, "windows": len(self._windows)}

    def _close(self) -> None:
        if self._base is None:
            return
        now = self._source.reading()
        window = Window.between(self._base, now)
        self._base = now
        if window.load_LE.any():
            self._windows.append(window)
