"""A device that is not there: its clock moves only when work is given to it."""

from typing import Any

import pytest


class FakeEvent:
    def __init__(self, device: "FakeDevice"):
        self.device, self.time, self.recorded = device, None, 0

    def record(self) -> None:
        self.recorded += 1
        if self.device.capturing is not None:
            self.device.capturing.append(self)
        else:
            self.time = self.device.now

    def query(self) -> bool:
        return self.time is not None and self.time <= self.device.past

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.past = max(self.device.past, self.time)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.query(), "read before the device was past it"
        return (end.time - self.time) * 1e3


class FakeDevice:
    """`now`: when all work given so far will have ended; `past`: what the device has reached."""

    on_device = True

    def __init__(self) -> None:
        self.now = self.past = 100.0
        self.waits = 0
        self.capturing: list[Any] | None = None

    def event(self, external: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def copy(self, tensor: Any) -> Any:
        return tensor

    def work(self, seconds: float) -> None:
        if self.capturing is None:
            self.now += seconds
        else:
            self.capturing.append(seconds)

    def replay(self, captured: list[Any]) -> None:
        for item in captured:
            if isinstance(item, float):
                self.now += item
            else:
                item.time = self.now

    def finish(self) -> None:
        self.past = self.now


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()
