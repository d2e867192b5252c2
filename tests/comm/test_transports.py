"""All transports against a dense float64 reference, over routings with every odd case."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROW_BYTES = {"float32": 4, "bfloat16": 2}


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 2, 3, 4, 4, 5]))
    experts = draw(st.integers(1, 9))
    # At least a slot per expert; more hold replicas or stay empty.
    slots = max(1, -(-experts // size)) + draw(st.integers(0, 2))
    return {
        "size": size,
        "experts": experts,
        "slots": slots,
        "top_k": draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        "hidden": draw(st.sampled_from([1, 3, 16, 33, 64])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "per_expert": draw(st.booleans()),
        "tokens": draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 12]), min_size=15, max_size=15)),
        "pattern": draw(
            st.sampled_from(["random", "one rank", "holes", "some rows empty", "none"])
        ),
        "in_flight": draw(st.integers(1, 2)),
        "steps": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def make_experts(rng, case):
    """Expert of each physical slot: all experts somewhere, the rest replicas or empty (-1)."""
    total = case["size"] * case["slots"]
    experts = np.concatenate(
        [
            np.arange(case["experts"]),
            rng.integers(-1, case["experts"], total - case["experts"]),
        ]
    )
    return rng.permutation(experts)


def make_step(rng, case, tokens, experts_P):
    usable = np.flatnonzero(experts_P >= 0)
    if case["pattern"] == "one rank":
        target = rng.choice(usable) // case["slots"]
        usable = usable[usable // case["slots"] == target]
    slots = rng.choice(usable, (tokens, case["top_k"]))
    if case["pattern"] == "holes":
        slots[rng.random(slots.shape) < 0.4] = -1
    if case["pattern"] == "some rows empty":
        slots[rng.random(tokens) < 0.5] = -1
    if case["pattern"] == "none":
        slots[:] = -1
    x = rng.standard_normal((tokens, case["hidden"])).astype(np.float32)
    return x, slots, rng.random((tokens, case["top_k"]), np.float32)


def reference(x, slots, weights, experts_P):
    e = experts_P[np.maximum(slots, 0)].astype(np.float64)
    y = x.astype(np.float64)[:, None] * (1 + e / 8)[..., None] - e[..., None]
    return (y * np.where(slots < 0, 0.0, weights)[..., None]).sum(1)


def moved_bytes(case, steps, experts_P):
    """Of rank 0: rows it sends, each once per rank, and rows it sends back, by path."""
    size, local, totals = case["size"], case["slots"], {"self": 0, "node": 0, "remote": 0}
    row = case["hidden"] * ROW_BYTES[case["dtype"]]
    for source in range(size):
        for _, slots, _ in steps[source]:
            dest = np.where(slots < 0, -1, slots // local)
            for peer in range(size):
                hit = (dest == peer).any(1).sum()
                back = (dest == peer).sum() if case["per_expert"] else hit
                if source == 0:
                    totals["self" if peer == 0 else "node"] += int(hit) * row
                if peer == 0:
                    totals["self" if source == 0 else "node"] += int(back) * row
    return totals


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_transports_agree_with_a_dense_reference(pool, case):
    kinds = ["collective", "shm"] if case["size"] > 1 else ["local"]
    check(pool, case, kinds)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_collective_transport_over_nccl(make_pool):
    pool = make_pool(2, (2,), device="cuda")
    for seed, pattern in enumerate(["random", "one rank", "holes", "some rows empty", "none"] * 4):
        case = {
            "size": 2, "experts": 5, "slots": 4, "top_k": 3, "hidden": 33, "seed": seed,
            "dtype": ["float32", "bfloat16"][seed // 5 % 2], "per_expert": seed >= 10,
            "tokens": [seed % 3 * 4, 7, 12], "pattern": pattern, "in_flight": 1, "steps": 3,
        }  # fmt: skip
        check(pool, case, ["collective"])


def check(pool, case, kinds):
    rng, size = np.random.default_rng(case["seed"]), case["size"]
    experts_P = make_experts(rng, case)
    tokens = itertools.cycle(case["tokens"])
    steps = [
        [make_step(rng, case, next(tokens), experts_P) for _ in range(case["steps"])]
        for _ in range(size)
    ]
    if case["dtype"] == "bfloat16":  # rows as they are once rounded
        for per_rank in steps:
            for x, _, _ in per_rank:
                x.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
    ranks = range(size)
    pool.poison(size)
    pool.call(
        ranks,
        "build",
        size,
        kinds,
        max_tokens=12,
        hidden=case["hidden"],
        top_k=case["top_k"],
        slots_per_rank=case["slots"],
        dtype=case["dtype"],
        per_expert=case["per_expert"],
    )
    for rank in ranks:
        pool.send(rank, "run", experts_P, steps[rank], case["in_flight"])
    results = [pool.answer(rank) for rank in ranks]
    tolerance = 2e-5 if case["dtype"] == "float32" else 3e-2
    for rank in ranks:
        for kind in kinds:
            for (out, received, _), step in zip(results[rank][kind], steps[rank], strict=True):
                expected = reference(*step, experts_P)
                scale = 1 + np.abs(expected).max(initial=0) + case["top_k"] * 9
                np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * scale)
                check_received(case, received)
        if len(kinds) > 1:
            for one, two in zip(*(results[rank][kind] for kind in kinds), strict=True):
                np.testing.assert_array_equal(one[0], two[0])
                for a, b in zip(one[1], two[1], strict=True):
                    np.testing.assert_array_equal(a, b)
    if size > 1:
        for kind in kinds:
            assert results[0][kind][-1][2] == moved_bytes(case, steps, experts_P)


def check_received(case, received):
    x, slots, weights = received
    assert x.shape == (len(slots), case["hidden"]) and slots.shape == weights.shape
    assert slots.min(initial=0) >= -1 and slots.max(initial=0) < case["slots"]
    assert not weights[slots < 0].any()
    if case["size"] > 1:  # a row comes only where it is needed
        assert (slots >= 0).any(1).all()


@pytest.mark.parametrize("per_expert", [False, True])
def test_many_exchanges_of_random_size(pool, per_expert):
    """Ranks race ahead of each other through both buffer sets."""
    experts_P = np.arange(8) % 6
    pool.poison(4)
    shape = {"max_tokens": 9, "hidden": 32, "top_k": 3, "slots_per_rank": 2, "dtype": "float32"}
    pool.call(range(4), "build", 4, ["shm"], per_expert=per_expert, **shape)
    assert pool.call(range(4), "many", 2000, 7, experts_P) == [0, 0, 0, 0]
    assert pool.call(range(4), "waited") == [{"shm": 4000}] * 4


def test_more_tokens_than_the_buffers_hold(pool, failed):
    pool.poison(2)
    shape = {"max_tokens": 4, "hidden": 8, "top_k": 1, "slots_per_rank": 1, "dtype": "float32"}
    pool.call(range(2), "build", 2, ["shm"], per_expert=False, **shape)
    step = (np.zeros((5, 8), np.float32), np.zeros((5, 1), np.int64), np.ones((5, 1), np.float32))
    pool.send(0, "run", np.arange(2), [step], 1)
    with pytest.raises(failed) as caught:
        pool.answer(0)
    kind, message, _ = caught.value.args
    assert kind == "CapacityError" and "5 tokens" in message and "4 per rank" in message


def test_a_third_dispatch_in_flight_is_refused(pool, failed):
    pool.poison(2)
    shape = {"max_tokens": 4, "hidden": 8, "top_k": 1, "slots_per_rank": 1, "dtype": "float32"}
    pool.call(range(2), "build", 2, ["shm"], per_expert=False, **shape)
    step = (np.zeros((1, 8), np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
    pool.send(0, "run", np.arange(2), [step] * 3, 3)
    with pytest.raises(failed, match="CrossdockError"):
        pool.answer(0)
