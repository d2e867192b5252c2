"""Experts change their slots under requests; tokens and logits do not."""

import pytest

from crossdock import LLM
from crossdock.core import ConfigError
from crossdock.launch.rebalance_check import Proof, compare, prove


def test_answers_do_not_change(storyteller):
    """Bit by bit in invariant mode, to rounding in ordinary mode, on 1, 2 and 4 ranks."""
    proofs = list(prove(str(storyteller), lambda stage: None, device="cpu"))
    assert [(p.mode, p.ranks) for p in proofs] == [
        (mode, ranks) for mode in ("invariant", "ordinary") for ranks in (1, 2, 4)
    ]
    for proof in proofs:
        assert proof.holds, proof
        assert proof.slots > 32 and proof.layers == 4 * proof.moves, proof
    assert proofs[0].compared == 6 * 32 * 21 * 2


def test_a_proof_fails_where_anything_differs_or_nothing_moved():
    assert compare([1.0, 2.0], [1.0, 2.0], 0.0) == (0.0, 0)
    assert compare([1.0, 2.0], [1.0, 2.0000001], 0.0)[1] == 1
    assert compare([1.0, 2.0], [1.0, 2.5], 0.1) == (0.5, 1)
    assert compare([1.0, 2.0], [1.0, float("nan")], 0.1)[1] == 1
    assert compare([1.0, 2.0], [1.0], 0.1)[1] == 2
    good = {"mode": "invariant", "ranks": 2, "slots": 8, "moves": 1, "layers": 2, "steps": 9,
            "compared": 5, "differ": 0, "worst": 0.0}  # fmt: skip
    assert Proof(**good).holds
    for name, value in (("layers", 0), ("compared", 0), ("differ", 1)):
        assert not Proof(**{**good, name: value}).holds


def test_an_engine_without_says_so(storyteller):
    with LLM(str(storyteller), ranks=1) as llm:
        result = llm.client.rebalance(llm.client.placement.slot_expert_LP, 60)
        assert 'rebalance = "off"' in result.error
    with LLM(str(storyteller), ranks=1, rebalance="manual") as other:
        now_LP = other.client.placement.slot_expert_LP
        with pytest.raises(ConfigError, match=r"expected \(layers, slots\) = \(4, 32\)"):
            other.client.rebalance(now_LP[:, :5], 60)
        result = other.client.rebalance(now_LP + 1, 60)
        assert "no slot holds expert 32 now" in result.error
        assert other.generate("Once upon a time")  # and goes on
