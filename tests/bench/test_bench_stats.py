import math
import random

import numpy as np
import pytest

from crossdock.bench.stats import (
    RequestRecord,
    load_result,
    parse_slo,
    percentile,
    spread,
    summary,
)
from crossdock.core import ConfigError


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(n):
    values = [random.expovariate(1.0) for _ in range(n)]
    for q in (0, 25, 50, 90, 99, 100):
        assert percentile(values, q) == pytest.approx(np.percentile(values, q))
    assert summary(values)["mean"] == pytest.approx(np.mean(values))


def test_of_nothing_is_nan():
    assert all(math.isnan(v) for v in summary([]).values())


@pytest.mark.parametrize(("total", "chunks"), [(7, 3), (3, 7), (64, 64), (1, 1), (0, 2), (65, 64)])
def test_spread_keeps_the_total_evenly(total, chunks):
    counts = spread(total, chunks)
    assert len(counts) == chunks and sum(counts) == total
    assert max(counts) - min(counts) <= 1
    if total:
        assert counts[0] >= 1


def test_latencies_of_one_request():
    record = RequestRecord(5, 10.0, ((10.5, 1), (11.0, 1), (13.0, 4)), 13.25)
    assert record.ttft == 0.5
    assert record.e2e == 3.25
    assert record.output_tokens == 6
    assert record.tpot == pytest.approx(2.5 / 5)  # the first token is no part of it
    assert record.itl == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5])


def test_tokens_that_came_with_the_first_waited_nothing():
    record = RequestRecord(5, 0.0, ((1.0, 3), (2.0, 2)), 2.0)
    assert record.itl == [0.0, 0.0, 0.5, 0.5]
    assert sum(record.itl) == pytest.approx(record.tpot * (record.output_tokens - 1))


def test_a_single_token_has_no_tpot():
    record = RequestRecord(5, 0.0, ((1.0, 1),), 1.0)
    assert record.tpot is None and record.itl == []
    assert record.meets({"tpot": 1e-9})


def test_goodput_counts_requests_that_keep_every_limit():
    good = RequestRecord(1, 0.0, ((0.1, 1), (0.2, 1)), 0.2)
    late = RequestRecord(1, 0.0, ((0.9, 1), (1.0, 1)), 1.0)
    slow = RequestRecord(1, 0.0, ((0.1, 1), (0.9, 1)), 0.9)
    failed = RequestRecord(1, 0.0, (), 0.1, "HTTP 500")
    result = load_result([good, late, slow, failed, good], 2.0, {"ttft": 0.5, "tpot": 0.5})
    assert result.goodput == 1.0
    assert load_result([good, late, slow], 1.0, {"ttft": 0.5}).goodput == 2.0
    assert load_result([good], 1.0).goodput is None


def test_rates_leave_failures_out():
    good = RequestRecord(7, 0.0, ((0.1, 1), (0.2, 2)), 0.2)
    failed = RequestRecord(9, 0.0, (), 0.1, "HTTP 500")
    result = load_result([good, failed, good], 2.0)
    assert (result.successes, result.failures) == (2, 1)
    assert (result.request_rate, result.input_rate, result.output_rate) == (1.0, 7.0, 3.0)
    assert result.counts == {"ttft": 2, "tpot": 2, "itl": 4, "e2e": 2}


def test_slo_words():
    assert parse_slo(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    for word in ("ttft", "ttft:", "ttft:-1", "speed:3", "ttft:nan"):
        with pytest.raises(ConfigError, match="ttft:500"):
            parse_slo([word])
