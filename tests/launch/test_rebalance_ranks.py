"""Experts change their slots under requests; tokens and logits do not."""

import threading

import numpy as np
import pytest

from crossdock import LLM, SamplingParams

PROMPTS = [f"Once upon a time there was a {word}" for word in ("dog", "cat", "fox", "girl", "tree")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def answers(llm):
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
    return [(o.token_ids, o.logprobs) for o in outputs]


def shuffled(rng, placement):
    experts, slots = placement.num_experts, placement.slot_expert_LP.shape[1]
    return np.array(
        [
            rng.permutation(
                np.concatenate([np.arange(experts), rng.integers(-1, experts, slots - experts)])
            )
            for _ in placement.slot_expert_LP
        ]
    )


def move_until(llm, stop, results):
    rng = np.random.default_rng()
    while not stop.is_set() or not results:
        results.append(llm.client.rebalance(shuffled(rng, llm.client.placement), 60))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_invariant_answers_do_not_change(storyteller, ranks):
    config = {"ranks": ranks, "invariant": True, "redundant_experts": 8}
    with LLM(str(storyteller), ranks=1, invariant=True) as llm:
        want = answers(llm)
    with LLM(str(storyteller), rebalance="manual", rebalance_step_mib=0.25, **config) as llm:
        stop, results = threading.Event(), []
        mover = threading.Thread(target=move_until, args=(llm, stop, results))
        mover.start()
        got = answers(llm)
        stop.set()
        mover.join(90)
        after = answers(llm)
    assert results and all(r.error is None and r.layers == 4 for r in results)
    assert got == want and after == want


def test_an_engine_without_says_so(storyteller):
    with LLM(str(storyteller), ranks=1) as llm:
        result = llm.client.rebalance(llm.client.placement.slot_expert_LP, 60)
        assert 'rebalance = "off"' in result.error
        with LLM(str(storyteller), ranks=1, rebalance="manual") as other:
            result = other.client.rebalance(other.client.placement.slot_expert_LP[:, :5], 60)
            assert "expected (layers, slots) = (4, 32)" in result.error
            assert answers(other)  # and goes on
