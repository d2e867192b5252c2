"""Counters, histograms and timed parts of a rank, and their exposition in the gateway."""

from typing import TYPE_CHECKING, Any

from crossdock.metrics.clock import CudaClock, HostClock
from crossdock.metrics.recorder import Histogram, Recorder
from crossdock.metrics.step_timer import StepTimer
from crossdock.metrics.step_timing import StepTiming

if TYPE_CHECKING:
    from crossdock.metrics.exposition import GatewayMetrics

__all__ = [
    "CudaClock",
    "GatewayMetrics",
    "Histogram",
    "HostClock",
    "Recorder",
    "StepTimer",
    "StepTiming",
]


def __getattr__(name: str) -> Any:
    # Lazily: rank processes record, only the gateway needs prometheus_client.
    if name == "GatewayMetrics":
        from crossdock.metrics.exposition import GatewayMetrics

        return GatewayMetrics
    raise AttributeError(f"module 'crossdock.metrics' has no attribute {name!r}")
