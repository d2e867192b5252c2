"""The clocks that steps are timed by: a device's, or the host's where it computes itself."""

from time import perf_counter
from typing import Any, Protocol


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event; times in ms."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class Clock(Protocol):
    on_device: bool

    def event(self, external: bool = False) -> Event:
        """`external`: recorded while a graph is captured, it is recorded again in each replay."""
        ...

    def copy(self, tensor: Any) -> Any:
        """To the host without waiting; there once an event recorded after it has passed."""
        ...


class CudaClock:
    """Events are recorded on the stream that is current then. Imports torch when used."""

    on_device = True

    def event(self, external: bool = False) -> Event:
        import torch

        return torch.cuda.Event(enable_timing=True, external=external)

    def copy(self, tensor: Any) -> Any:
        import torch

        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return held.copy_(tensor, non_blocking=True)


class HostEvent:
    time = 0.0

    def record(self) -> None:
        self.time = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end.time - self.time) * 1e3


class HostClock:
    on_device = False

    def event(self, external: bool = False) -> Event:
        return HostEvent()

    def copy(self, tensor: Any) -> Any:
        return tensor
