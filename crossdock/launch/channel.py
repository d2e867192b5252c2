"""The message channel between gateway and rank: JSON frames over a socket pair.

The pair has no name, so no other user can open it, and nothing is ever unpickled.
"""

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from crossdock.core.messages import decode, encode


class Channel:
    """`recv` raises EOFError once the other side is gone; `send` then raises OSError."""

    def __init__(self, fd: int):
        self._connection = Connection(fd)

    def send(self, message: Any) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    def recv(self) -> Any:
        return decode(self._connection.recv_bytes())

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` would return at once; None waits without end and without the CPU."""
        return self._connection.poll(timeout)

    def close(self) -> None:
        self._connection.close()


def channel_pair() -> tuple[Channel, int]:
    """`(ours, the child's descriptor)`; the child's must be inherited, then closed here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fd = os.dup(theirs.fileno())
    theirs.close()
    return Channel(ours.detach()), fd
