"""A choice's text: stop strings wait for min_tokens, however the tokens arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core import Sampled, SamplingParams, TokenOutput
from crossdock.launch.output import Choice
from crossdock.models.byte_tokenizer import ByteTokenizer
from crossdock.models.detokenizer import StopChecker


def run(
    params: SamplingParams, ids: list[int], cuts: list[int]
) -> tuple[list[str], str | None, int | str | None]:
    """`(the text of each update, how it ended, why)`."""
    choice = Choice(0, 0, params, ByteTokenizer())
    edges = [0, *sorted(cuts), len(ids)]
    texts = []
    for a, b in pairwise(edges):
        tokens = tuple(Sampled(token) for token in ids[a:b])
        update = choice.push(TokenOutput("r", tokens, "length" if b == len(ids) else None))
        texts.append(update.text)
        if update.finish_reason is not None:
            return texts, update.finish_reason, update.stop_reason
    raise AssertionError("it did not end")


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 19), max_size=8),
    min_tokens=st.integers(0, 20),
    include=st.booleans(),
)
def test_stop_strings_are_found_after_min_tokens(text, stop, cuts, min_tokens, include):
    params = SamplingParams(
        stop=tuple(stop), min_tokens=min_tokens, max_tokens=20, include_stop_str_in_output=include
    )
    cuts = [cut for cut in cuts if cut < len(text)]
    texts, finish, reason = run(params, list(text.encode()), cuts)
    checker = StopChecker(tuple(stop), include)
    shown, found = checker.push(text[min_tokens:])
    shown += "" if found else checker.flush()
    assert "".join(texts) == text[:min_tokens] + shown
    assert (finish, reason) == (("stop", found) if found else ("length", None))


def test_nothing_is_held_back_before_min_tokens():
    params = SamplingParams(stop=("ab",), min_tokens=3, max_tokens=9)
    texts, finish, reason = run(params, list(b"abaxabc"), [1, 2, 3, 4, 5, 6])
    assert texts == ["a", "b", "a", "x", "", ""]  # the last "a" might begin one
    assert (finish, reason) == ("stop", "ab")
    # One that begins before is not one.
    assert "".join(run(params, list(b"xxabaab"), [])[0]) == "xxaba"


def test_a_character_counts_where_it_is_complete():
    params = SamplingParams(stop=("\u00e9",), min_tokens=2, max_tokens=9)
    ids = list("a\u00e9\u00e9b".encode())
    assert run(params, ids, [1, 2, 3]) == (["a", "", ""], "stop", "\u00e9")


@pytest.mark.parametrize(("min_tokens", "shown"), [(1, "a"), (2, "a\ufffd")])
def test_a_torn_end_is_text_like_any_other(min_tokens, shown):
    params = SamplingParams(stop=("\ufffd",), min_tokens=min_tokens, max_tokens=2)
    assert "".join(run(params, [97, 0xC3], [1])[0]) == shown
