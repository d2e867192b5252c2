"""The router's choice, made without a look at every group, is `choose_group`'s."""

import random

import pytest

from crossdock.scheduler import PrefixIndex, Router, choose_group, extend_digests, root_digest


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 24])
def test_the_router_chooses_as_a_look_at_all_groups_would(groups, caching):
    rng = random.Random(groups)
    page, places = 4, 5
    router = Router(groups, page_size=page, max_num_seqs=places, prefix_caching=caching)
    indices = [PrefixIndex(16384) for _ in range(groups)]
    shared = [[rng.randrange(9) for _ in range(40)] for _ in range(3)]
    queued = []
    for number in range(40 * groups):
        prompt = rng.choice(shared)[: rng.choice((0, 8, 40))]
        prompt = prompt + [rng.randrange(9) for _ in range(rng.randint(1, 12))]
        digests = []
        if caching:
            extend_digests(digests, prompt, page, root_digest(""))
        usable = digests[: (len(prompt) - 1) // page]
        cached = [index.match(usable) * page for index in indices]
        expected = choose_group(router.loads, cached, places)
        assert router.route(f"r{number}", prompt, rng.randint(1, 99)) == expected
        indices[expected].insert(digests)
        queued.append(f"r{number}")
        # In turns the groups fill up, so that no place is left, and empty again.
        leaving = rng.choice((0, 0, 1) if number % (20 * groups) < 12 * groups else (0, 2, 2))
        for _ in range(min(leaving, len(queued))):
            ending = queued.pop(rng.randrange(len(queued)))
            if rng.random() < 0.7:
                router.started(ending)
            router.release(ending)
    for name in queued:
        router.release(name)
    assert all(load.tokens == load.requests == 0 for load in router.loads)
