"""`bench balance`: methods that change answers, on the checkpoint that ships; replica choices."""

import random
from pathlib import Path

import pytest

from crossdock.bench.balance_answers import AnswersOptions, report, run_answers
from crossdock.bench.balance_choice import replica_choices
from crossdock.core import ConfigError

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


def test_methods_stand_beside_the_model_as_it_is(tmp_path):
    words = ("the", "king", "and", "queen", "had", "a", "fox", "in", "their", "old", "forest")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.choices(words, k=5000)))
    options = AnswersOptions(str(STORYTELLER), text, 4, 4096, (8.0, 0.5), (0.02,))
    cases = run_answers(options, lambda stage: None)
    by = {(c.name, c.shape["method"], c.shape["value"]): c for c in cases}
    assert len(by) == len(cases) == 8
    even = {key[1:]: case.median for key, case in by.items() if key[0] == "answers_imbalance"}
    score = {key[1:]: c.median for key, c in by.items() if key[0] == "answers_log_likelihood"}
    # A capacity that nobody reaches is none; a tight one evens out, and drops.
    assert even["capacity", 8.0] == even["off", 0.0] and score["capacity", 8.0] == score["off", 0.0]
    assert 1.0 <= even["capacity", 0.5] < even["off", 0.0]
    assert by["answers_imbalance", "capacity", 0.5].more["dropped"] > 0.3
    assert score["capacity", 0.5] != score["off", 0.0] != score["bias", 0.02]
    assert by["answers_log_likelihood", "bias", 0.02].against == {"off": score["off", 0.0]}
    document = report(options, cases, "command").document()
    assert document["options"]["text"] == "text.txt" and len(document["cases"]) == 8


def test_a_text_that_is_too_short_or_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no text that can be read"):
        run_answers(AnswersOptions(str(STORYTELLER), tmp_path / "no"), lambda stage: None)
    text = tmp_path / "short.txt"
    text.write_text("Once upon a time")
    with pytest.raises(ConfigError, match="tokens, expected 4096 or more"):
        run_answers(AnswersOptions(str(STORYTELLER), text), lambda stage: None)


def test_quotas_are_even_and_as_near_as_the_nearest():
    by = {case.shape["choice"]: case for case in replica_choices(16, 2, 256)}
    assert 1.0 <= by["quota"].median < by["hash"].median
    near = by["nearest"].more["on_own_rank"]
    assert by["hash"].more["on_own_rank"] < by["quota"].more["on_own_rank"] <= near
