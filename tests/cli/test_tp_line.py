"""What the start says of split attention."""

from pathlib import Path

import pytest

from crossdock.cli.starting import padding_line, tp_padding
from crossdock.core import load_spec

MODELS = Path(__file__).parents[2] / "recipes" / "models"


@pytest.mark.parametrize(
    ("model", "tp", "line"),
    [
        (
            "deepseek-v2-lite",  # 5,472 columns of a dense layer in tiles up to 5,504
            2,
            "lost to padding of shards to tiles of 128: 0.6% of the dense width",
        ),
        ("deepseek-v3", 4, "nothing is lost to padding"),
        ("qwen3-30b-a3b", 2, "nothing is lost to padding"),
    ],
)
def test_what_padding_costs(model: str, tp: int, line: str) -> None:
    spec = load_spec(next(p for p in MODELS.glob("*.json") if p.stem == model))
    assert padding_line(tp_padding(spec, tp)) == line
    assert tp_padding(spec, 1) == {}
