"""What sampling parameters are refused, and what Python callers may pass."""

import math

import pytest

from crossdock.core import RequestError, SamplingParams


@pytest.mark.parametrize(
    "name,wrong",
    [
        ("n", 0), ("n", 2.0), ("n", True),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", 50.0), ("top_k", -2), ("min_p", math.inf),
        ("seed", 1.5), ("max_tokens", 3.5), ("max_tokens", 0), ("min_tokens", 1.5),
        ("logprobs", 1.0), ("logprobs", 21), ("repetition_penalty", 0),
        ("ignore_eos", "yes"), ("ignore_eos", 1), ("skip_special_tokens", None),
        ("include_stop_str_in_output", []),
        ("stop", 5), ("stop", [b"a"]), ("stop", [""]), ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [1.5]), ("logit_bias", {1.5: 1}),
        ("logit_bias", {5: "x"}), ("logit_bias", [1]),
        ("logit_bias", {5: 101}),
    ],
)  # fmt: skip
def test_what_cannot_be_names_its_field(name, wrong):
    with pytest.raises(RequestError, match=name) as refused:
        SamplingParams(**{name: wrong})
    assert refused.value.param == name


def test_lists_texts_and_dicts_become_tuples():
    params = SamplingParams(stop="a", stop_token_ids=[1, 2], logit_bias={3: 1}, top_k=-1)
    assert (params.stop, params.stop_token_ids, params.top_k) == (("a",), (1, 2), 0)
    assert params.logit_bias == ((3, 1.0),) and hash(params)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
