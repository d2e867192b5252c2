"""Sampling parameters that come with a checkpoint."""

import json

import pytest

from crossdock.core import CheckpointError
from crossdock.models.generation_config import sampling_defaults
from crossdock.models.tokenizer_files import eos_token_ids


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


@pytest.mark.parametrize("wrong", ["2", 1.5, {"a": 1}, [[1]], [1, "x"], -1])
def test_what_cannot_end_a_text_is_told(tmp_path, wrong):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id .*expected"):
        eos_token_ids(tmp_path, None)
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        eos_token_ids(tmp_path, None)
