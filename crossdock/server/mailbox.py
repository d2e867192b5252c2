"""How updates get from the engine client's threads to the coroutine of their HTTP request."""

import asyncio
import time
from collections import deque
from typing import NamedTuple

from crossdock.server.border import Update
from crossdock.server.errors import ApiError


class Letter(NamedTuple):
    """`prompt`: which of the request's prompts. `at`: time.perf_counter of its arrival here."""

    prompt: int
    update: Update
    at: float


class Inbox:
    """The letters of one HTTP request; lives on the event loop."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._waiter: asyncio.Future[None] | None = None
        self.gone = False
        """The client has disconnected."""
        self.cut: ApiError | None = None
        """Why the server ends this request before the engine has."""

    def put(self, letter: Letter) -> None:
        self._letters.append(letter)
        self._wake()

    def disconnect(self) -> None:
        self.gone = True
        self._wake()

    def end(self, why: ApiError) -> None:
        self.cut = self.cut or why
        self._wake()

    async def take(self) -> list[Letter]:
        """All letters there are, at least one unless the request is over (`gone`, `cut`)."""
        if not (self._letters or self.gone or self.cut):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        letters, self._letters = self._letters, []
        return letters

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Mailbox:
    """Wakes the event loop once for all the letters that one step brings."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._pending: deque[tuple[Inbox, Letter]] = deque()
        self._called = False

    def post(self, inbox: Inbox, prompt: int, update: Update) -> None:
        """Called from any thread."""
        self._pending.append((inbox, Letter(prompt, update, time.perf_counter())))
        # Appended first, looked second: whoever still sees a call pending is read by that call.
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._pending.clear()  # the loop has closed: nobody is left to read

    def _deliver(self) -> None:
        self._called = False
        while self._pending:
            inbox, letter = self._pending.popleft()
            inbox.put(letter)
