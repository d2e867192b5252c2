"""Exchanges on a stream of their own, beside what the compute stream does from begin to end."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from crossdock.core import Received, Routing, Transport
from crossdock.core.protocols import Ticket
from crossdock.metrics import Recorder

PROGRAMS = 48
"""Of each half of an exchange beside computing: at four a multiprocessor both fill 24, the default
of DeepEP's kernels on Hopper."""
_FIRST = -1
"""Priority of the stream: an exchange that has begun must not wait for room behind computing."""


class LimitedTransport(Transport, Protocol):
    """One whose kernels can be told how many programs to have."""

    def limited(self, programs: int) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, eq=False)
class _Begun:
    """`reads`: what the exchange reads, which must not be freed before it has ended."""

    result: Any
    done: torch.cuda.Event
    reads: tuple[Any, ...]


class ApartTransport:
    """`inner` of CUDA ranks. Whatever is begun is launched whole, sending and receiving in one, so
    that no rows are waited for on the compute stream, and one exchange at a time: each of its
    halves has at most `programs`, and kernels beside it get the rest of the device. Of those only
    exchanges of counts wait for peers, with a program a rank.

    Tensors cross streams without being recorded: an exchange waits for all that the compute stream
    was given before it, so memory of the exchanges' stream that was freed meanwhile is read by
    nobody; and what it reads is kept until the compute stream has waited for it.
    """

    def __init__(
        self, inner: LimitedTransport, device: torch.device, programs: int, recorder: Recorder
    ):
        self.inner, self.programs, self._recorder = inner, programs, recorder
        self.per_expert, self.on_device = inner.per_expert, inner.on_device
        self._stream = torch.cuda.Stream(device, priority=_FIRST)

    @property
    def max_tokens(self) -> int | None:
        return self.inner.max_tokens

    def dispatch_begin(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> _Begun:
        launch = lambda: self.inner.dispatch(x_TH, routing, most_tokens)  # noqa: E731
        return self._begin("dispatch_apart", launch, (x_TH, routing))

    def dispatch_end(self, pending: _Begun) -> tuple[Received, Ticket]:
        return self._end(pending)

    def dispatch(
        self, x_TH: Tensor, routing: Routing, most_tokens: int | None = None
    ) -> tuple[Received, Ticket]:
        return self.inner.dispatch(x_TH, routing, most_tokens)

    def combine_begin(self, y: Tensor, ticket: Ticket) -> _Begun:
        return self._begin("combine_apart", lambda: self.inner.combine(y, ticket), (y, ticket))

    def combine_end(self, pending: _Begun) -> Tensor:
        return self._end(pending)

    def combine(self, y: Tensor, ticket: Ticket) -> Tensor:
        return self.inner.combine(y, ticket)

    def bytes_sent(self) -> dict[str, int]:
        return self.inner.bytes_sent()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        """`inner` is closed by whoever made it."""

    def _begin(self, part: str, launch: Callable[[], Any], reads: tuple[Any, ...]) -> _Begun:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self.inner.limited(self.programs):
            with self._recorder.span(part):
                result = launch()
            return _Begun(result, self._stream.record_event(), reads)

    def _end(self, pending: _Begun) -> Any:
        torch.cuda.current_stream().wait_event(pending.done)
        return pending.result


def build_apart(
    kind: str, transport: Transport, device: torch.device, recorder: Recorder
) -> Transport:
    """`transport`, of this kind, as it is used where work is put between begin and end."""
    if kind != "nvlink" or device.type != "cuda":
        return transport
    # Imports triton.
    from crossdock.comm.nvlink import NvlinkTransport

    assert isinstance(transport, NvlinkTransport)
    return ApartTransport(transport, device, PROGRAMS, recorder)
