"""Which sizes are captured, and which one a step replays."""

from itertools import pairwise

import pytest

from crossdock.engine.graphs import decode_sizes, prompt_sizes
from crossdock.engine.prompt_inputs import keys_of, tokens_for


@pytest.mark.parametrize("most", [1, 2, 7, 31, 32, 33, 64, 100, 256, 300, 512, 1000])
def test_sizes_of_decodes_rise_to_the_most(most):
    sizes = decode_sizes(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    padding = [next(s for s in sizes if s >= rows) / rows for rows in range(8, most + 1)]
    assert max(padding, default=1) < 2


@pytest.mark.parametrize(("least", "most"), [(256, 8192), (64, 8192), (512, 1000), (256, 300)])
def test_sizes_of_prompts_lie_close_and_hold_all_sequences(least, most):
    sizes = prompt_sizes(least, most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes)) and sizes[0] >= least
    assert all(b <= 1.6 * a for a, b in pairwise(sizes))
    assert sizes[0] < 2 * max(least, 256) + 2


def test_a_step_is_made_for_its_keys():
    assert all(keys_of(tokens_for(keys)) >= keys for keys in range(1, 20000))
    assert keys_of(8192) == 10240
