"""How decodes of unequal length are grouped."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.layers.attention.plan import SPLIT_GAIN, length_groups


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_groups_cover_all_rows_and_never_pad_more(lens: list[int]) -> None:
    lens = sorted(lens, reverse=True)
    groups = length_groups(lens)
    assert groups[0][0] == 0 and groups[-1][1] == len(lens)
    assert all(a[1] == b[0] for a, b in pairwise(groups))
    padded = sum(lens[start] * (end - start) for start, end in groups)
    assert padded + SPLIT_GAIN * (len(groups) - 1) <= lens[0] * len(lens)


@pytest.mark.parametrize(
    ("lens", "groups"),
    [
        ([200] * 32, [(0, 32)]),
        ([210, 200, 190, 20], [(0, 4)]),
        ([4000] + [200] * 31, [(0, 1), (1, 32)]),
    ],
)
def test_examples(lens: list[int], groups: list[tuple[int, int]]) -> None:
    assert length_groups(lens) == groups
