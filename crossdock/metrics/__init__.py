"""Counters, histograms and timed parts of a rank, and their exposition in the gateway."""

from crossdock.metrics.recorder import Histogram, Recorder

__all__ = ["Histogram", "Recorder"]
