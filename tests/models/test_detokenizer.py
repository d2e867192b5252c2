"""Stop strings in a stream: what is shown must not depend on how the text arrives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.models.detokenizer import StopChecker


def run(stop: tuple[str, ...], deltas: list[str], include: bool = False) -> tuple[str, str | None]:
    checker, shown = StopChecker(stop, include), ""
    for delta in deltas:
        text, found = checker.push(delta)
        shown += text
        if found is not None:
            return shown, found
    return shown + checker.flush(), None


def first_complete(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """By definition: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4, unique=True),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_any_cutting_gives_the_first_complete_stop(text, stop, cuts, include):
    edges = [0, *sorted(cuts), len(text)]
    deltas = [text[a:b] for a, b in pairwise(edges)]
    assert run(tuple(stop), deltas, include) == first_complete(text, tuple(stop), include)


@given(text=st.text("abcd", max_size=30), stop=st.text("abc", min_size=1, max_size=6))
def test_nothing_is_held_back_that_cannot_begin_a_stop(text, stop):
    checker = StopChecker((stop,))
    shown, found = checker.push(text)
    if found is None:
        held = text[len(shown) :]
        longest = next(k for k in range(len(stop) - 1, -1, -1) if text.endswith(stop[:k]))
        assert held == stop[:longest]
        assert checker.flush() == held


def test_a_stop_string_over_several_deltas():
    checker = StopChecker(("\n\nUser:",))
    assert checker.push("Hi\n") == ("Hi", None)
    assert checker.push("\nUs") == ("", None)
    assert checker.push("ing it") == ("\n\nUsing it", None)
    assert checker.push("\n\nUser: more") == ("", "\n\nUser:")


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abSTOP")])
def test_include(include, shown):
    assert run(("STOP",), ["abS", "TOPcd"], include) == (shown, "STOP")


def test_no_stop_strings_hold_nothing():
    checker = StopChecker(())
    assert checker.push("abc") == ("abc", None)
    assert checker.flush() == ""
