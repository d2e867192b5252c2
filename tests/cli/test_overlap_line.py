"""What the start says of overlap, and what it refuses before anything is started."""

from pathlib import Path

import pytest

from crossdock import LLM
from crossdock.cli.starting import overlap_line
from crossdock.core import ConfigError
from crossdock.engine.overlap import OverlapPolicy, Rung, forced

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


def test_the_line_names_modes_sizes_and_the_reason():
    rungs = (
        Rung(0, "off"), Rung(8, "off"), Rung(32, "sbo"), Rung(128, "sbo"), Rung(512, "sbo", True),
    )  # fmt: skip
    line = overlap_line(OverlapPolicy("auto", rungs, "measured up to 512 tokens a rank").describe())
    assert line == (
        "off, sbo from 32 tokens, tbo from 512 tokens (measured up to 512 tokens a rank)"
    )
    assert overlap_line(forced("tbo").describe()) == "tbo (as set)"


@pytest.mark.parametrize("overlap", ["sbo", "tbo"])
def test_one_rank_is_refused(overlap):
    with pytest.raises(ConfigError, match=f"'{overlap}' cannot run: no rows travel on one rank"):
        LLM(str(STORYTELLER), overlap=overlap)
