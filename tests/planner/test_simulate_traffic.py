import json

import pytest

from crossdock.core import ConfigError
from crossdock.planner.simulate import Arrival, read_trace


def write(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_a_trace_is_sorted_and_starts_at_0(tmp_path):
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival_s": 12.5, "isl": 30, "osl": 4},
        "",
        {"arrival_s": 10, "isl": 20, "osl": 2, "prefix": 7, "prefix_tokens": 16},
    )
    assert read_trace(path) == (Arrival(0.0, 20, 2, "7", 16), Arrival(2.5, 30, 4))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":2: not JSON"),
        ("[1]", ":2: expected an object"),
        ({"arrival_s": 1, "isl": 5, "osl": 0}, ":2: osl: expected a number of tokens from 1"),
        ({"arrival_s": 1, "isl": True, "osl": 1}, ":2: isl: .* got True"),
        ({"arrival_s": "1", "isl": 5, "osl": 1}, ":2: arrival_s: expected seconds, got '1'"),
        ({"isl": 5, "osl": 1}, ":2: arrival_s"),
        ({"arrival_s": 1, "isl": 5, "osl": 1, "olen": 3}, ":2: unknown key 'olen'"),
        ({"arrival_s": 1, "isl": 5, "osl": 1, "prefix": "a"}, ":2: prefix and prefix_tokens"),
        (
            {"arrival_s": 1, "isl": 5, "osl": 1, "prefix": "a", "prefix_tokens": 6},
            r":2: prefix_tokens: expected 0 to isl \(5\), got 6",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    path = write(tmp_path / "trace.jsonl", {"arrival_s": 0, "isl": 1, "osl": 1}, row)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_trace_needs_requests(tmp_path):
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(tmp_path / "trace.jsonl", ""))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
