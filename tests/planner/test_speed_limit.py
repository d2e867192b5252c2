"""The published bound, exactly: Insights into DeepSeek-V3, section 2.3.2."""

import pytest

from crossdock.planner.cost import speed_limit


def test_infiniband() -> None:
    limit = speed_limit(50e9)
    assert limit.exchange_s == pytest.approx(120.96e-6, rel=1e-12)
    assert limit.token_s == pytest.approx(14.75712e-3, rel=1e-12)
    assert limit.tokens_per_s == pytest.approx(67.76, abs=0.005)


def test_nvl72() -> None:
    limit = speed_limit(900e9)
    assert limit.exchange_s == pytest.approx(6.72e-6, rel=1e-12)
    assert round(limit.token_s * 1e3, 2) == 0.82
    assert round(limit.tokens_per_s, -2) == 1200


def test_the_true_hidden_size() -> None:
    limit = speed_limit(50e9, hidden=7168)
    assert limit.exchange_s * 1e6 == pytest.approx(123.9, abs=0.05)
    assert limit.token_s * 1e3 == pytest.approx(15.1, abs=0.05)


def test_only_moe_layers_exchange() -> None:
    assert speed_limit(50e9, layers=58).token_s == pytest.approx(
        speed_limit(50e9).token_s * 58 / 61
    )
