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


def test_all_ranks_tell_the_same_sizes_of_steps():
    snapshots = []
    for rank in range(2):
        recorder = Recorder()
        for tokens in (1, 300, 512, 513):
            recorder.histograms["iteration_tokens"].observe(tokens)
        snapshots.append(Snapshot(rank, recorder.snapshot()))
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: snapshots, ranks=2, top_k=2, load_window_tokens=100))
    seen = {
        (sample.name.rsplit("_", 1)[1], sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
        if sample.name.startswith("crossdock:iteration_tokens_total")
    }
    assert seen["sum", None] == 1326 and seen["count", None] == 4
    assert [seen["bucket", le] for le in ("1.0", "256.0", "512.0", "1024.0")] == [1, 1, 3, 4]


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
