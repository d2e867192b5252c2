"""The alert rules: what they name is exported, and promtool finds that they fire as meant."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from crossdock.metrics import GatewayMetrics
from crossdock.metrics.exposition import Engine
from crossdock.metrics.rebalances import Rebalances

ALERTS = Path(__file__).parents[2] / "recipes" / "prometheus" / "alerts.yml"


def rules():
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_rules_are_whole_and_name_exported_metrics():
    metrics = GatewayMetrics()
    metrics.attach(Engine(lambda: [], 2, 2, 100, Rebalances(1.2)))
    families = text_string_to_metric_families(metrics.expose().decode())
    # A family without a sample yet is announced too; counters without their suffix.
    exported = {name for f in families for name in (f.name, f"{f.name}_total")}
    assert len(rules()) == 4
    for name, rule in rules().items():
        expr = rule["expr"]
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}"), name
        used = set(re.findall(r"crossdock:\w+", expr))
        assert used and used <= exported, name
        assert rule["labels"]["severity"] and rule["annotations"]["summary"]
        mentioned = set(re.findall(r"crossdock:\w+", rule["annotations"]["description"]))
        assert mentioned <= exported, name


def test_preemptions_say_what_to_look_at():
    text = rules()["CrossdockPreemptionsRising"]["annotations"]["description"]
    assert all(word in text for word in ("KV", "more ranks", "FP8", "fewer sequences"))


@pytest.mark.parametrize(
    "command", [["check", "rules", str(ALERTS)], ["test", "rules", "alerts_test.yml"]]
)
def test_promtool_agrees(command):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    done = subprocess.run(
        [promtool, *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
