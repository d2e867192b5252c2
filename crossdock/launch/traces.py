"""Traces of some steps of all ranks, one at a time, as the gateway sees them."""

import threading
from collections.abc import Callable
from typing import Any

from crossdock.core import Busy, CrossdockError, RequestError
from crossdock.core.json_values import is_whole
from crossdock.core.messages import Trace, Traced

_GIVE_UP_S = 20.0
"""How long ranks may take to hand over what they have of a trace that is given up."""


class Traces:
    """Thread-safe. `broadcast`: sends a message to every rank."""

    def __init__(self, ranks: int, broadcast: Callable[[Any], None]):
        self._ranks, self._broadcast = ranks, broadcast
        self._changed = threading.Condition()
        self._id, self._under_way = 0, False
        self._got: dict[int, Traced] = {}
        self._cut = self._closed = False

    def record(self, steps: int, timeout: float) -> list[Traced]:
        """`start` and `result`."""
        self.start(steps)
        return self.result(timeout)

    def start(self, steps: int) -> None:
        """Traces the next `steps` steps that run, which are the same on all ranks, until `result`
        is asked for. Raises Busy while that has not been, RequestError for no number of steps."""
        if not is_whole(steps):
            raise RequestError(f"steps must be a whole number from 1, got {steps!r}", "steps")
        with self._changed:
            if self._under_way:
                raise Busy("steps are being traced already; ask again when that has ended")
            self._id += 1
            self._got, self._under_way, self._cut = {}, True, False
            self._broadcast(Trace(self._id, steps))

    def result(self, timeout: float) -> list[Traced]:
        """Of every rank; with fewer steps, or none, if no more ran within `timeout` seconds, or
        until `finish`.

        Raises:
            CrossdockError: the engine ended, or a rank does not answer.
        """
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._cut or self._ended, timeout)
                if not self._ended:
                    self._broadcast(Trace(self._id, 0))
                    self._changed.wait_for(lambda: self._ended, _GIVE_UP_S)
                if self._closed:
                    raise CrossdockError("the engine ended while its steps were traced")
                if missing := sorted(set(range(self._ranks)) - set(self._got)):
                    raise CrossdockError(f"ranks {missing} did not hand over what they traced")
                return [self._got[rank] for rank in range(self._ranks)]
            finally:
                self._under_way = False

    def ended(self, message: Traced) -> None:
        with self._changed:
            if message.id == self._id:
                self._got[message.rank] = message
                self._changed.notify_all()

    def finish(self) -> None:
        """A trace that is under way ends with the steps that have run."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _ended(self) -> bool:
        return self._closed or len(self._got) == self._ranks
