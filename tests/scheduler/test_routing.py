import random

import pytest

from crossdock.scheduler import GroupLoad, PrefixIndex, Router, choose_group


def make(groups=4, **changes):
    return Router(groups, **{"page_size": 4, "max_num_seqs": 16, **changes})


def prompt(length, rng=random):
    return [rng.randrange(10**6) for _ in range(length)]


def requests(router):
    return [load.requests for load in router.loads]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_a_burst_of_equal_requests_spreads_evenly(groups):
    router = make(groups)
    for i in range(groups * 8):
        router.route(f"r{i}", prompt(50), 64)
        assert max(requests(router)) - min(requests(router)) <= 1


def test_a_burst_of_unequal_requests_spreads_by_tokens():
    rng = random.Random(1)
    router = make()
    for i in range(200):
        router.route(f"r{i}", prompt(rng.randint(5, 500), rng), rng.randint(1, 200))
    tokens = [load.tokens for load in router.loads]
    assert max(tokens) - min(tokens) <= 2 * 500 + 200


def test_shared_prefixes_go_together_until_the_group_is_loaded():
    router = make(max_num_seqs=64)
    shared = prompt(400)
    groups = [router.route(f"r{i}", shared + prompt(8), 64) for i in range(60)]
    together = groups.index(next(g for g in groups if g != groups[0]))
    assert 5 <= together <= 25
    # Once every group holds the prefix the rest spreads.
    assert min(requests(router)) >= 8


def test_a_short_common_prefix_does_not_gather_requests():
    router = make()
    shared = prompt(8)  # the head of a chat template
    for i in range(32):
        router.route(f"r{i}", shared + prompt(50), 64)
    assert max(requests(router)) - min(requests(router)) <= 1


def test_a_conversation_returns_to_its_group():
    router = make()
    talks = {f"t{i}": prompt(60) for i in range(8)}
    home = {}
    for turn in range(5):
        for name, tokens in talks.items():
            group = router.route(f"{name}.{turn}", tokens, 20)
            assert home.setdefault(name, group) == group
            router.started(f"{name}.{turn}")
            tokens += prompt(30)
        for name in talks:
            router.release(f"{name}.{turn}")
    assert sorted(home.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_full_groups_come_last_even_with_the_prefix():
    router = make(2, max_num_seqs=2)
    shared = prompt(4000)
    groups = [router.route(f"r{i}", shared + prompt(4), 16) for i in range(4)]
    assert groups == [0, 0, 1, 1]
    assert router.route("late", shared, 16) in (0, 1)
    router.release("r0")
    router.release("late")
    assert router.route("next", shared, 16) == 0


def test_counts_return_to_nothing():
    rng = random.Random(2)
    router = make()
    live = []
    for i in range(500):
        if live and rng.random() < 0.5:
            router.release(live.pop(rng.randrange(len(live))))
        else:
            live.append(f"r{i}")
            router.route(live[-1], prompt(rng.randint(1, 90), rng), 30)
            if rng.random() < 0.5:
                router.started(live[-1])
                router.started(live[-1])
        assert sum(requests(router)) == len(live) == router.num_open
    for name in live:
        router.release(name)
        router.release(name)
    assert router.loads == (GroupLoad(),) * 4


@pytest.mark.parametrize("caching", [True, False])
def test_digests_may_be_computed_before(caching):
    rng = random.Random(3)
    routers = [make(max_num_seqs=99, prefix_caching=caching) for _ in range(2)]
    prompts = [prompt(rng.randint(0, 90), rng) for _ in range(9)]
    for i in range(200):
        tokens = rng.choice(prompts)
        given = routers[0].route(f"r{i}", tokens, 30, routers[0].page_digests(tokens))
        assert given == routers[1].route(f"r{i}", tokens, 30)
    assert routers[0].loads == routers[1].loads


def test_an_id_is_routed_once():
    router = make()
    router.route("a", [1], 1)
    with pytest.raises(ValueError, match="already routed"):
        router.route("a", [1], 1)


def test_caching_off_and_empty_prompts_go_by_load():
    router = make(2, prefix_caching=False)
    shared = prompt(400)
    assert [router.route(f"r{i}", shared, 8) for i in range(4)] == [0, 1, 0, 1]
    assert make(2).route("empty", [], 8) == 0


def test_choose_group():
    busy, idle = GroupLoad(3, 700, 100), GroupLoad(1, 100, 0)
    assert choose_group([busy, idle], [0, 0], 16) == 1
    assert choose_group([busy, idle], [160, 0], 16) == 1
    assert choose_group([busy, idle], [240, 0], 16) == 0
    assert choose_group([busy, idle], [240, 40], 16) == 1
    assert choose_group([busy, idle], [9999, 0], 3) == 1
    assert choose_group([idle, GroupLoad(0, 100, 0), GroupLoad(0, 100, 0)], [0] * 3, 16) == 1


def test_the_index_forgets_what_was_sent_longest_ago():
    index = PrefixIndex(4)
    index.insert([b"a1", b"a2"])
    index.insert([b"b1", b"b2"])
    index.insert([b"a1"])
    index.insert([b"c1"])
    assert index.match([b"a1", b"a2"]) == 1
    assert index.match([b"b1", b"b2"]) == 2
    assert index.match([b"c1"]) == 1
    assert index.match([b"x"]) == 0


def test_a_prefix_is_looked_for_in_what_the_kv_holds():
    router = make(2)
    router.resize(8)
    old, new = prompt(20), prompt(20)
    at = [router.route(str(i), tokens, 1) for i, tokens in enumerate((old, new, prompt(20)))]
    assert at == [0, 1, 0]  # the third leaves 3 of the 5 pages of the first
    for name in "012":
        router.release(name)
    router.route("a", old, 1)
    assert router.loads[0].queued_tokens == 20 - 3 * 4
