"""NVML's performance monitor, played by a stand-in with the names of nvidia-ml-py."""

import sys
from types import SimpleNamespace

import pytest

from crossdock.core.messages import Snapshot
from crossdock.metrics import GatewayMetrics, Recorder
from crossdock.metrics.exposition import Engine
from crossdock.metrics.gpu_activity import GpuActivity, watch_gpu


class FakeNvml:
    """`use`: percent by metric since the sample before; a metric that it lacks is refused."""

    NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = 0, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = (
        2,
        5,
        10,
    )

    class NVMLError(Exception):
        pass

    def __init__(self, use, supported=True):
        self.use, self.supported = use, supported
        self.samples, self.broken = [], False

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-abc":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self.supported))

    def nvmlGpmSampleAlloc(self):
        self.samples.append(SimpleNamespace(taken=None, freed=False))
        return self.samples[-1]

    def nvmlGpmSampleGet(self, handle, sample):
        assert handle == "handle"
        sample.taken = len(self.samples)
        return sample

    def nvmlGpmSampleFree(self, sample):
        assert not sample.freed
        sample.freed = True

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(
            metrics=[SimpleNamespace(metricId=0, nvmlReturn=1, value=0.0) for _ in range(98)]
        )

    def nvmlGpmMetricsGet(self, query):
        assert query.version == 1 and query.sample1.taken < query.sample2.taken
        assert not query.sample1.freed
        if self.broken:
            raise self.NVMLError("GPU is lost")
        for metric in query.metrics[: query.numMetrics]:
            if metric.metricId in self.use:
                metric.value, metric.nvmlReturn = self.use[metric.metricId], 0
        return query


def test_shares_since_the_last_reading(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("crossdock.metrics.gpu_activity.time.monotonic", lambda: now[0])
    nvml = FakeNvml({2: 87.5, 5: 40.0})
    activity = GpuActivity(nvml, "handle")
    assert activity.read() == {}  # too early
    now[0] += 1
    assert activity.read() == {"sm": 0.875, "tensor": 0.4}  # and what is refused is left out
    nvml.use = {2: 50.0, 5: 0.0, 10: 25.0}
    assert activity.read()["sm"] == 0.875
    now[0] += 1
    assert activity.read() == {"sm": 0.5, "tensor": 0.0, "dram": 0.25}
    assert [sample.freed for sample in nvml.samples] == [True, True, False]


def test_a_driver_that_fails_leaves_figures_out_until_it_answers(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("crossdock.metrics.gpu_activity.time.monotonic", lambda: now[0])
    nvml = FakeNvml({2: 50.0})
    activity = GpuActivity(nvml, "handle")
    seen = []
    for broken in (False, True, False):
        now[0] += 1
        nvml.broken = broken
        seen.append(activity.read())
    assert seen == [{"sm": 0.5}, {}, {"sm": 0.5}]
    assert [sample.freed for sample in nvml.samples] == [True, True, True, False]


@pytest.mark.parametrize(
    ("nvml", "uuid", "why"),
    [
        (None, "abc", "not installed"),
        (FakeNvml({}), "other", "Not Found"),
        (FakeNvml({}, supported=False), "abc", "no performance monitor"),
    ],
)
def test_where_there_is_none_it_says_why(monkeypatch, nvml, uuid, why):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    activity, said = watch_gpu(uuid)
    assert activity is None and why in said


def test_a_rank_that_has_one_shows_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({}))
    activity, said = watch_gpu("abc")
    assert activity is not None and "NVML" in said
    recorders = Recorder(), Recorder()
    recorders[1].source("gpu_activity", lambda: {"sm": 0.5, "dram": 0.75})
    snapshots = [Snapshot(rank, r.snapshot()) for rank, r in enumerate(recorders)]
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: snapshots, ranks=2, top_k=2, load_window_tokens=100))
    lines = [line for line in metrics.expose().decode().splitlines() if line[0] != "#"]
    assert [line for line in lines if "gpu_" in line] == [
        'crossdock:gpu_sm_activity{rank="1"} 0.5',
        'crossdock:gpu_dram_activity{rank="1"} 0.75',
    ]
