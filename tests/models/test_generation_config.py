"""Sampling parameters that come with a checkpoint."""

import json

import pytest

from crossdock.core import CheckpointError
from crossdock.models.generation_config import sampling_defaults


def test_what_the_file_says(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(tmp_path / "config.json") == {}  # where a model has no folder
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "do_sample": True}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "high"}, {"top_k": -5}])
def test_what_no_request_may_have_is_told(tmp_path, wrong):
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=f"{next(iter(wrong))}.*sampling_defaults"):
        sampling_defaults(tmp_path)
