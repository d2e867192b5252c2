"""Minutes of mixed requests, here seconds: everything is accounted for, and what is not is seen."""

from collections import Counter
from pathlib import Path

from crossdock.bench.soak import Soak, SoakOptions, report, run_soak

STORYTELLER = str(Path(__file__).parents[2] / "checkpoints" / "storyteller")
SETTINGS = {"device": "cpu", "kv_memory_gib": 0.004, "max_num_seqs": 8, "max_model_len": 64}


def test_nothing_is_lost_under_preemption_and_aborts():
    soak = run_soak(SoakOptions(STORYTELLER, 1, 0.06, 24, 30, 30, SETTINGS))
    assert soak.lost == 0 and soak.submitted > 20
    assert soak.ended["length"] > 10 and not soak.ended["error"]
    made = {case.name: case for case in report(soak, "").cases}
    assert made["requests_lost"].reached and made["pages_not_returned"].reached
    assert made["kv_cache_used"].n > 0
    assert (
        made["requests_lost"].more["preemptions"]
        == soak.last[0]["scheduler"]["num_preemptions_total"]
    )


def test_what_is_lost_or_kept_or_grows_is_told():
    ranks = [{"rss_bytes": n << 20, "scheduler": {"kv_cache_usage_perc": 0.9}} for n in range(40)]
    soak = Soak(
        SoakOptions("m", 1, 1.0, 1, 1, 1),
        seconds=60.0,
        submitted=10,
        tokens=600,
        ended=Counter(length=7, error=1),
        samples=[{"seconds": 1.0, "ranks": [rank]} for rank in ranks],
        last=[{"scheduler": {"pages_used": 3, "num_preemptions_total": 0}}],
        info=[{"device": "cpu"}],
    )
    made = {case.name: case for case in report(soak, "").cases}
    assert made["requests_lost"].median == 3 and made["requests_lost"].reached is False
    assert made["pages_not_returned"].median == 3 and made["pages_not_returned"].reached is False
    assert made["growth_of_rss"].median == 20 and made["output_throughput"].median == 10
