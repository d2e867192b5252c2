"""Open requests without ranks: what is counted, and what is computed once."""

from collections.abc import Iterable

import numpy as np
import pytest

from crossdock.core import (
    EngineConfig,
    GQASpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    Sampled,
    SamplingParams,
    TokenOutput,
)
from crossdock.core.messages import Add
from crossdock.launch import Update
from crossdock.launch.opened import Submission
from crossdock.launch.requests import Requests
from crossdock.models.byte_tokenizer import ByteTokenizer
from crossdock.scheduler import routing

SPEC = ModelSpec(
    architecture="Test",
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    vocab_size=256,
    attention=GQASpec(1, 1, 8),
    rope=RopeSpec(8, 10000.0),
    moe=MoESpec(num_experts=4, top_k=2, intermediate_size=8),
    moe_layers=(0,),
    rms_norm_eps=1e-6,
    max_position=4096,
)


class Ranks:
    """Keeps what it is told."""

    def __init__(self) -> None:
        config = EngineConfig(model="m", ranks=2, max_num_seqs=64)
        self.names: list[str] = []
        self.requests = Requests(config, SPEC, 4096, self.send, lambda: None, lambda: None)
        self.requests.tokenizer = ByteTokenizer()

    def send(self, ranks: Iterable[int], message) -> None:
        if isinstance(message, Add):
            self.names.append(message.request.id)

    def submit(self, *asked: tuple[str, list[int], int]) -> None:
        self.requests.submit(
            [Submission(n, ids, SamplingParams(n=k), lambda update: None) for n, ids, k in asked]
        )


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_every_choice_counts_until_it_ends(ranks: Ranks) -> None:
    ranks.submit(("a", [1, 2], 5), ("b", [3], 2))
    assert len(ranks.requests) == len(ranks.names) == 7
    ranks.requests.deliver(TokenOutput(ranks.names[1], (Sampled(65),)))
    assert len(ranks.requests) == 7
    for count, name in enumerate(ranks.names[:5], 1):
        ranks.requests.deliver(TokenOutput(name, (), "length"))
        ranks.requests.deliver(TokenOutput(name, (), "length"))
        assert len(ranks.requests) == 7 - count
    ranks.requests.abort("b")
    assert len(ranks.requests) == 0


def test_none_is_open_after_all_were_ended(ranks: Ranks) -> None:
    ranks.submit(("a", [1, 2], 5), ("b", [3], 2))
    ranks.requests.end_all(Update(0, finish_reason="abort"))
    ranks.requests.abort("a")
    assert len(ranks.requests) == 0


def test_a_prompts_digests_are_computed_once_for_all_choices(ranks: Ranks, monkeypatch) -> None:
    computed, extend = [], routing.extend_digests

    def count(digests, tokens, page_size, root) -> None:
        computed.append(len(tokens))
        extend(digests, tokens, page_size, root)

    monkeypatch.setattr(routing, "extend_digests", count)
    prompt = np.random.default_rng().integers(0, 256, 1000).tolist()
    ranks.submit(("a", prompt, 128), ("b", prompt[:500], 3))
    assert len(ranks.requests) == len(ranks.names) == 131
    assert computed == [1000, 500]


def test_what_is_interrupted_while_it_starts_is_not_counted(ranks: Ranks, monkeypatch) -> None:
    def interrupted(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("crossdock.launch.requests.Choice", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.submit(("a", [5], 2))
    assert len(ranks.requests) == 0
