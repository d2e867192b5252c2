"""Messages between gateway and ranks: what goes in comes out, and rubbish is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core import (
    CrossdockError,
    EngineConfig,
    Request,
    Sampled,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from crossdock.core import messages as m

logprob = TokenLogprob(3, -0.5, 1)
params = SamplingParams(
    n=2,
    temperature=0.7,
    seed=-(2**63),
    logit_bias=((5, -100.0), (7, 1.5)),
    stop=("\n\n", "é😀"),
    stop_token_ids=(1, 2),
    max_tokens=None,
    logprobs=2,
)
request = Request("r-1", (1, 2, 3), params, eos_token_ids=(0,), key=2**64 - 1, emitted=(9,))
output = TokenOutput(
    "r-1", (Sampled(3, logprob, (logprob, logprob)), Sampled(4)), "stop", 0, 16, 0.25, None
)
MESSAGES = [
    m.Start(1, EngineConfig("m", ranks=2, kv_memory_gib=0.1), {"shm": 5}, "127.0.0.1:1"),
    m.Progress(0, "weights", 1, 2),
    m.Ready(0, {"device": "cpu", "pages": 10, "layers": (1, 2), "nested": {"a": None}}),
    m.Add(request),
    m.Wake(4),
    m.Rebalance(1, ((0, 1, -1), (1, 0, 0)), 5),
    m.Rebalanced(1, 1, 2, 4096, 0.5, "a copy arrived damaged"),
    m.Abort("r-1"),
    m.Report(7),
    m.Trace(1, 20),
    m.Traced(1, 1, ((40, "experts", 2**53, 2**53 + 1000),), ((40, 9, 7, 2**50, 2**33),)),
    m.Stop(),
    m.Outputs(0, (output, TokenOutput("r-2", error="no", finish_reason="error"))),
    m.Snapshot(0, {"seconds": {"step": 0.1}, "load": ((1, 2), (3, 4))}, 7),
    m.Failure(0, "it broke\n", 1, True, "Traceback"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    decoded = m.decode(m.encode(message))
    assert decoded == message and type(decoded) is type(message)


def test_every_message_class_is_tested():
    mine = {type(message).__name__ for message in MESSAGES}
    carried = {"EngineConfig", "Request", "SamplingParams", "TokenLogprob"}
    assert mine | carried == set(m._CLASSES)


@given(
    ids=st.lists(st.integers(0, 2**31 - 1)),
    text=st.text(st.characters()),
    seed=st.integers(-(2**63), 2**64 - 1) | st.none(),
    temperature=st.floats(0, 100),
)
def test_any_request_survives(ids, text, seed, temperature):
    """Also lone surrogates, which have no UTF-8 form."""
    p = SamplingParams(stop=(text,) if text else (), seed=seed, temperature=temperature)
    message = m.Add(Request(text, tuple(ids), p))
    assert m.decode(m.encode(message)) == message


def test_bytes_have_one_line():
    """So that they can travel as lines."""
    assert b"\n" not in m.encode(MESSAGES[-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b'{"$":"NoSuchClass"}',
        b'{"$":["Stop"]}',
        b'{"$":"Wake"}',
        b'{"$":"Wake","wave":1,"more":2}',
        b'{"$":"EngineConfig","model":"m","ranks":0}',
        b"[" * 100_000,
    ],
)
def test_rubbish_is_an_error_of_ours(data):
    with pytest.raises(CrossdockError):
        m.decode(data)


def test_what_is_not_a_message_does_not_travel():
    with pytest.raises(TypeError, match="Exception does not travel"):
        m.encode(m.Snapshot(0, {"error": Exception("x")}))
