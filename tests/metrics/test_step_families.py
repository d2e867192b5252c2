"""MFU, MBU and exposed communication of hand-made totals."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossdock.core.ceilings import Ceilings
from crossdock.core.messages import Snapshot
from crossdock.metrics import GatewayMetrics, Recorder
from crossdock.metrics.exposition import Engine


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def rank_of(recorder, step, dispatch, combine, flops, nbytes, ns):
    for part, seconds in (("step", step), ("dispatch", dispatch), ("combine", combine)):
        recorder.count(part, seconds)
    for name, amount in (("timed_ns", ns), ("timed_flops", flops), ("timed_bytes", nbytes)):
        recorder.add(name, amount)


def figures(metrics):
    return {
        (sample.name.removeprefix("crossdock:"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def attached(recorders, ceilings, clock):
    metrics = GatewayMetrics(clock=clock)
    snapshots = lambda: [Snapshot(i, r.snapshot()) for i, r in enumerate(recorders)]  # noqa: E731
    metrics.attach(Engine(snapshots, len(recorders), 2, 100, ceilings=ceilings))
    return metrics


def test_work_is_a_share_of_what_the_devices_reach():
    recorders, clock = (Recorder(), Recorder()), Clock()
    metrics = attached(recorders, Ceilings(2e9, 1e9, "mine.toml"), clock)
    rank_of(recorders[0], 1.0, 0.1, 0.2, flops=600_000_000, nbytes=200_000_000, ns=500_000_000)
    rank_of(recorders[1], 1.0, 0.3, 0.0, flops=200_000_000, nbytes=100_000_000, ns=500_000_000)
    seen = figures(metrics)
    assert seen["mfu",] == pytest.approx(0.4)  # 0.8 G in 1 s of ranks that reach 2 G/s
    assert seen["mbu",] == pytest.approx(0.3)
    assert seen["exposed_communication_ratio",] == pytest.approx(0.3)
    assert seen["ceiling", "bytes_per_s", "mine.toml"] == 1e9
    assert seen["timed_steps_total",] == 2
    assert seen["step_seconds_total", "dispatch"] == pytest.approx(0.4)
    clock.now += 40  # what came before is no longer recent
    rank_of(recorders[0], 3.0, 0.0, 0.3, flops=0, nbytes=900_000_000, ns=1_000_000_000)
    figures(metrics)
    clock.now += 1
    seen = figures(metrics)
    assert seen["mfu",] == 0
    assert seen["mbu",] == pytest.approx(0.9)
    assert seen["exposed_communication_ratio",] == pytest.approx(0.1)


def test_without_ceilings_or_timed_steps_there_is_no_share():
    recorders = (Recorder(),)
    seen = figures(attached(recorders, Ceilings(2e9, 1e9, "mine.toml"), Clock()))
    assert not {"mfu", "mbu", "exposed_communication_ratio"} & {key[0] for key in seen}
    rank_of(recorders[0], 1.0, 0.1, 0.1, flops=10, nbytes=10, ns=10)
    seen = figures(attached(recorders, None, Clock()))
    assert not {"mfu", "mbu", "ceiling"} & {key[0] for key in seen}
    assert seen["exposed_communication_ratio",] == pytest.approx(0.2)
