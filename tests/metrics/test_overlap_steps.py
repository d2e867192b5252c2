"""Steps by overlap mode: all ranks take part in each, so they are counted once."""

from prometheus_client.parser import text_string_to_metric_families

from crossdock.core.messages import Snapshot
from crossdock.metrics import GatewayMetrics, Recorder
from crossdock.metrics.exposition import Engine


def test_steps_of_all_ranks_count_once():
    counts = ({"off": 3, "sbo": 0, "tbo": 7}, {"off": 3, "sbo": 0, "tbo": 8})
    snapshots = []
    for rank, steps in enumerate(counts):
        recorder = Recorder()
        recorder.source("overlap_steps", lambda steps=steps: steps)
        snapshots.append(Snapshot(rank, recorder.snapshot()))
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: snapshots, ranks=2, top_k=2, load_window_tokens=100))
    seen = {
        sample.labels["mode"]: sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
        if sample.name == "crossdock:overlap_steps_total"
    }
    assert seen == {"off": 3, "sbo": 0, "tbo": 8}


def test_a_reset_forgets_sources_too():
    recorder, kept = Recorder(), [5]
    recorder.source("rows", lambda: list(kept), kept.clear)
    recorder.observe("dispatch", 1.0)
    recorder.add("steps")
    recorder.reset()
    snapshot = recorder.snapshot()
    assert snapshot["rows"] == [] and not snapshot["seconds"] and not snapshot["counters"]
    assert snapshot["histograms"]["dispatch"]["sum"] == 0
    assert len(snapshot["histograms"]["dispatch"]["counts"]) > 1
