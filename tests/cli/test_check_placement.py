"""`check --placement`: its table, its document and its exit code."""

import json

import pytest

from crossdock.cli.main import run
from crossdock.launch.rebalance_check import Proof

GOOD = Proof("invariant", 2, 36, 3, 12, 40, 8064, 0, 0.0)
BAD = Proof("ordinary", 4, 36, 3, 12, 40, 3, 1, 0.25)


@pytest.mark.parametrize(("proofs", "code"), [([GOOD], 0), ([GOOD, BAD], 1)])
def test_what_the_proofs_say_is_the_exit_code(monkeypatch, capfd, proofs, code):
    asked = []

    def prove(model, on_stage):
        asked.append(model)
        on_stage("1 rank, nothing moves")
        yield from proofs

    monkeypatch.setattr("crossdock.launch.rebalance_check.prove", prove)
    assert run(["check", "--placement", "somewhere", "--json"]) == code
    document = json.loads(capfd.readouterr().out)
    assert document["holds"] is (code == 0) and asked == ["somewhere"]
    assert [case["holds"] for case in document["cases"]] == [p.holds for p in proofs]
    assert run(["check", "--placement", "somewhere"]) == code
    shown = capfd.readouterr().out
    assert ("Moving experts changes nothing" in shown) is (code == 0)
    assert ("Answers differ" in shown) is (code == 1)
