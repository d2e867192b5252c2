"""What changes answers can be seen in the exposition."""

from crossdock.core.messages import Snapshot
from crossdock.metrics import GatewayMetrics
from crossdock.metrics.exposition import Engine


def exposed(snapshots, **altering):
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: snapshots, 2, 2, 100, altering=altering))
    return metrics.expose().decode()


def test_settings_drops_and_bias_are_told():
    values = [
        {
            "dropped_tokens": [3, 4],
            "router_bias": {"router_bias_updates": 2, "router_bias_largest": x},
        }
        for x in (0.02, 0.02)
    ]
    text = exposed([Snapshot(r, v) for r, v in enumerate(values)], expert_capacity=1.25)
    assert 'crossdock:answers_altered_by{setting="expert_capacity"} 1.25' in text
    assert "crossdock:dropped_tokens_total 14.0" in text
    assert "crossdock:router_bias_updates 2.0" in text
    assert "crossdock:router_bias_largest 0.02" in text


def test_without_them_nothing_is_said_but_that_nothing_was_dropped():
    text = exposed([Snapshot(0, {"dropped_tokens": [0, 0]})])
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert not any("answers_altered_by" in line or "router_bias" in line for line in samples)
    assert "crossdock:dropped_tokens_total 0.0" in samples
