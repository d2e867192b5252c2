"""What a GPU's own performance monitor says (NVML's GPM, on Hopper and later).

Not NVML's "utilisation", which is the share of time in which anything at all ran: one thread that
spins for a peer makes it 100%.
"""

import logging
import time
from typing import Any

_log = logging.getLogger(__name__)
LEAST_S = 0.1
"""NVML wants two samples at least so far apart."""
_METRICS = {
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class GpuActivity:
    """
    Args:
        nvml: the module `pynvml`.
        handle: NVML's, of one GPU.
    """

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self._before, self._taken = self._sample(), time.monotonic()
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Shares by "sm", "tensor" and "dram", over the time since the last reading; empty before
        the first, and what NVML cannot tell is left out."""
        now = time.monotonic()
        if now - self._taken < LEAST_S:
            return self._last
        try:
            self._last = self._compare(self._sample())
        except self._nvml.NVMLError as error:
            # Serving goes on without figures, which are absent from now on until NVML answers.
            _log.warning("NVML does not tell what the GPU does: %s", error)
            self._last = {}
        self._taken = now
        return self._last

    def _compare(self, sample: Any) -> dict[str, float]:
        """With the sample before, whose place it takes."""
        nvml, before = self._nvml, self._before
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        query.sample1, query.sample2 = before, sample
        for at, metric in enumerate(_METRICS.values()):
            query.metrics[at].metricId = getattr(nvml, metric)
        self._before = sample
        try:
            nvml.nvmlGpmMetricsGet(query)
        finally:
            nvml.nvmlGpmSampleFree(before)
        return {
            name: query.metrics[at].value / 100
            for at, name in enumerate(_METRICS)
            if query.metrics[at].nvmlReturn == nvml.NVML_SUCCESS
        }

    def _sample(self) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        return self._nvml.nvmlGpmSampleGet(self._handle, sample)


def watch_gpu(uuid: str) -> tuple[GpuActivity | None, str]:
    """Of the GPU called so, and where that is from; or None, and why."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None, "this kind of GPU has no performance monitor in NVML (Hopper has)"
        return GpuActivity(pynvml, handle), "from NVML's performance monitor"
    except pynvml.NVMLError as error:
        return None, f"NVML refuses: {error}"
