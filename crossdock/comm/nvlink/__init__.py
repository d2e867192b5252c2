"""Rows over NVLink by Triton kernels; on CPUs the same kernels in Triton's interpreter.

Importing this imports triton, so it is done only where this transport is chosen.
"""

from crossdock.comm.nvlink.counts import NvlinkCounts, build_nvlink_counts, nvlink_counts_bytes
from crossdock.comm.nvlink.exchange import Arrived, Masked, NvlinkExchange, Segments
from crossdock.comm.nvlink.layout import NvlinkLayout, nvlink_bytes, nvlink_layouts
from crossdock.comm.nvlink.transport import NvlinkTransport, build_nvlink

__all__ = [
    "Arrived",
    "Masked",
    "NvlinkCounts",
    "NvlinkExchange",
    "NvlinkLayout",
    "NvlinkTransport",
    "Segments",
    "build_nvlink",
    "build_nvlink_counts",
    "nvlink_bytes",
    "nvlink_counts_bytes",
    "nvlink_layouts",
]
