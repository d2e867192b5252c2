"""Which copy serves a token changes no bit in invariant mode; what changes answers says so."""

import logging

import numpy as np
import pytest

from crossdock import LLM, SamplingParams

PROMPTS = ("Once upon a time", "The old king called", "A fox", "In the forest", "x")
# Ranks with nothing left to do still take part in every exchange.
PARAMS = [SamplingParams(max_tokens=n, temperature=0.0, logprobs=5) for n in (16, 3, 2, 4, 1)]


def answers(llm):
    results = llm.generate(PROMPTS, PARAMS)
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results]


def serve(path, **settings):
    with LLM(str(path), device="cpu", **settings) as llm:
        return answers(llm), [rank.values for rank in llm.client.snapshots(60)]


def test_no_choice_of_replicas_changes_a_bit(storyteller):
    """Before and after the experts have moved."""
    alone, _ = serve(storyteller, invariant=True)
    rng = np.random.default_rng()
    for choice in ("nearest", "quota"):
        settings = {"ranks": 3, "redundant_experts": 10, "replica_choice": choice}
        settings |= {"prefix_caching": False, "rebalance": "manual", "device": "cpu"}
        with LLM(str(storyteller), invariant=True, **settings) as llm:
            assert answers(llm) == alone, choice
            moved = rng.permuted(llm.client.placement.slot_expert_LP, axis=1)
            assert llm.client.rebalance(moved, 60).error is None
            assert answers(llm) == alone, choice
            ranks = [rank.values for rank in llm.client.snapshots(60)]
        exchanges = {rank["calls"].get("counts", 0) for rank in ranks}
        # As often on every rank, whether it had tokens or not; only for quotas.
        assert len(exchanges) == 1 and (exchanges != {0}) == (choice == "quota")
        if choice == "quota":
            assert all(r["seconds"]["counts"] > 0 for r in ranks)


def test_quotas_over_a_process_group(storyteller):
    _, ranks = serve(
        storyteller, ranks=2, redundant_experts=8, replica_choice="quota", transport="collective"
    )
    assert all(rank["calls"]["counts"] > 0 for rank in ranks)


def test_what_changes_answers_says_so_and_is_the_same_on_all_ranks(storyteller, caplog):
    settings = {"expert_capacity": 1.0, "router_bias_step": 0.01, "load_window_tokens": 20}
    with caplog.at_level(logging.WARNING):
        outputs, ranks = serve(storyteller, ranks=2, **settings)
    assert "expert_capacity = 1, router_bias_step = 0.01" in caplog.text
    assert [len(token_ids) for token_ids, _ in outputs] == [p.max_tokens for p in PARAMS]
    for rank in ranks:
        assert sum(rank["dropped_tokens"]) > 0
        assert sum(map(sum, rank["slot_tokens"])) > 0
    served = sum(sum(map(sum, rank["slot_tokens"])) for rank in ranks)
    chosen = sum(sum(map(sum, rank["expert_tokens"])) for rank in ranks)
    assert served == chosen - sum(sum(rank["dropped_tokens"]) for rank in ranks)
    first, second = (rank["router_bias"] for rank in ranks)
    assert first == second and first["router_bias_updates"] > 0
    assert first["router_bias_largest"] == pytest.approx(0.01 * first["router_bias_updates"])
