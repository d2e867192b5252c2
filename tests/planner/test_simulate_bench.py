"""`bench plan`: its document says what was simulated and how its time grew."""

import json

from crossdock.bench.case_table import render
from crossdock.bench.plan import PlanBenchOptions, report, run_plan


def test_the_report_counts_rank_steps_and_compares_sizes():
    run = run_plan(PlanBenchOptions(ranks=(2, 16), seconds=0.01, repeats=2, target=1.0))
    document = json.loads(json.dumps(report(run, "crossdock bench plan").document()))
    speeds = [c for c in document["cases"] if c["name"] == "simulator_speed"]
    sizes = [(c["shape"]["ranks"], c["shape"]["simulated"]) for c in speeds]
    assert sizes == [(2, 2), (16, 16), (16, 2)]
    for case in speeds:
        assert case["n"] == 2 and case["reached"] is True
        ranks = case["shape"]["ranks"]
        assert all(steps > 5 * ranks and steps % ranks == 0 for steps in case["rank_steps"])
        minutes = [seconds / 60 for seconds in case["cpu_s"]]
        rates = [s / m for s, m in zip(case["rank_steps"], minutes, strict=True)]
        assert min(rates) <= case["median"] <= max(rates)
    (growth,) = [c for c in document["cases"] if c["name"] == "time_per_rank_step"]
    assert growth["shape"]["variant"] == "16 ranks / 2 ranks"
    assert render(report(run, "crossdock bench plan"))
