from itertools import count

import pytest

from crossdock.core import BROKEN, Request, Sampled, SamplingParams
from crossdock.scheduler import Scheduler


def make(**changes):
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        "page_size": 4,
        "num_pages": 64,
    }
    return Scheduler(**{**settings, **changes})


def request(name, prompt=5, eos=(), emitted=(), **params):
    ids = tuple(range(1000, 1000 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(name, ids, SamplingParams(**params), eos, emitted=tuple(emitted))


def step(scheduler, token=7):
    """One synchronous step in which every sequence samples `token`; the plan and the outputs."""
    plan = scheduler.plan()
    scheduler.advance(plan)
    sampled = [Sampled(token) if item.sample else None for item in plan.items]
    return plan, scheduler.observe(plan, sampled)


def run(scheduler, tokens):
    """Feed one lone request; its outputs."""
    outputs = []
    for token in tokens:
        if not scheduler.has_work:
            break
        outputs += step(scheduler, token)[1]
    return outputs


def shape(plan):
    return [(i.request.id, i.start, len(i.tokens), i.sample) for i in plan.items]


def test_prompts_are_chunked_behind_decodes_under_the_budget():
    s = make(max_num_batched_tokens=8, prefix_caching=False)
    s.add(request("a", 5))
    assert shape(step(s)[0]) == [("a", 0, 5, True)]
    s.add(request("b", 17))
    s.add(request("c", 3))
    assert shape(step(s)[0]) == [("a", 5, 1, True), ("b", 0, 7, False)]
    assert shape(step(s)[0]) == [("a", 6, 1, True), ("b", 7, 7, False)]
    assert shape(step(s)[0]) == [("a", 7, 1, True), ("b", 14, 3, True), ("c", 0, 3, True)]
    assert shape(step(s)[0]) == [(n, at, 1, True) for n, at in (("a", 8), ("b", 17), ("c", 3))]


def test_one_token_prefills_lie_among_the_decodes():
    s = make(max_num_batched_tokens=8, prefix_caching=False)
    s.add(request("a", 5))
    step(s)
    s.add(request("b", 8))  # 7, then 1
    step(s)
    s.add(request("c", 4))
    s.add(request("d", 1))
    plan, _ = step(s)
    assert shape(plan) == [
        ("a", 6, 1, True), ("b", 7, 1, True), ("d", 0, 1, True), ("c", 0, 4, True),
    ]  # fmt: skip
    assert plan.num_decodes == 3


def test_places_are_limited_and_taken_in_order():
    s = make(max_num_seqs=2)
    for name in "abc":
        s.add(request(name, max_tokens=2))
    assert [i.request.id for i in step(s)[0].items] == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    step(s)
    assert [i.request.id for i in step(s)[0].items] == ["c"]


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop", "length"),
    [
        ({"max_tokens": 3}, [5] * 9, "length", None, 3),
        ({"max_tokens": 9, "eos": (2,)}, [5, 5, 2, 5], "stop", None, 3),
        ({"max_tokens": 4, "eos": (2,), "ignore_eos": True}, [2] * 9, "length", None, 4),
        ({"max_tokens": 9, "stop_token_ids": (6, 8)}, [5, 8, 5], "stop", 8, 2),
        (
            {"max_tokens": 9, "stop_token_ids": (2,), "eos": (2,), "ignore_eos": True},
            [2],
            "stop",
            2,
            1,
        ),
        ({"max_tokens": 9, "min_tokens": 3, "stop_token_ids": (8,)}, [8] * 9, "stop", 8, 3),
        ({"max_tokens": 9, "min_tokens": 4, "eos": (2,)}, [2] * 9, "stop", None, 4),
        ({"max_tokens": 1, "eos": (2,)}, [2], "stop", None, 1),
        ({"max_tokens": None, "prompt": 90}, [5] * 40, "length", None, 10),
        ({"max_tokens": 50, "prompt": 90}, [5] * 40, "length", None, 10),
        ({"max_tokens": 5, "emitted": (5, 5, 5)}, [5] * 9, "length", None, 2),
        (
            {"max_tokens": 9, "min_tokens": 4, "emitted": (5, 5), "eos": (2,)},
            [2] * 9,
            "stop",
            None,
            2,
        ),
    ],
)
def test_endings(params, tokens, reason, stop, length):
    s = make()
    s.add(request("a", **params))
    outputs = run(s, tokens)
    assert [t.token_id for o in outputs for t in o.tokens] == tokens[:length]
    assert [o.finish_reason for o in outputs] == [None] * (length - 1) + [reason]
    assert outputs[-1].stop_token_id == stop
    assert not s.has_work
    assert s.pool.available == 64


@pytest.mark.parametrize(
    ("emitted", "params", "reason"),
    [((4, 4), {"max_tokens": 2}, "length"), ((4, 2), {"eos": (2,)}, "stop")],
)
def test_a_resumed_request_that_had_ended_ends_without_a_token(emitted, params, reason):
    s = make()
    s.add(request("a", emitted=emitted, **params))
    assert s.has_work
    plan, (output,) = step(s)
    assert (plan.items, output.tokens, output.finish_reason) == ((), (), reason)
    assert not s.has_work


@pytest.mark.parametrize(
    ("prompt", "settings", "numbers"),
    [
        (100, {}, ("100", "max_model_len is 100")),
        (130, {}, ("130", "max_model_len is 100")),
        (41, {"num_pages": 10}, ("41", "11 KV pages", "are 10")),
        (0, {}, ("empty",)),
    ],
)
def test_what_can_never_fit_ends_with_an_error(prompt, settings, numbers):
    s = make(**settings)
    s.add(request("big", prompt))
    s.add(request("small", 3, max_tokens=1))
    _, outputs = step(s)
    errors = {o.request_id: o.error for o in outputs}
    assert all(number in errors["big"] for number in numbers)
    assert errors["small"] is None
    assert not s.has_work


def test_a_lone_request_may_fill_the_whole_cache():
    s = make(num_pages=3, max_model_len=1000)
    s.add(request("a", 12, max_tokens=None))
    outputs = run(s, [5] * 20)
    assert [o.finish_reason for o in outputs] == ["length"]  # 12 tokens of KV, and the 13th
    s.add(request("b", 2, max_tokens=None))
    assert len(run(s, [5] * 20)) == 11


def test_the_last_arrived_gives_way_and_recomputes_its_outputs():
    s = make(num_pages=6, prefix_caching=False)
    s.add(request("a", 7, max_tokens=20))
    s.add(request("b", 7, max_tokens=20))
    for _ in range(6):  # two pages each, then three, all full after 12 tokens
        step(s)
    assert s.pool.available == 0
    plan, _ = step(s, 9)
    assert shape(plan) == [("a", 12, 1, True)]
    assert (s.num_running, s.num_waiting) == (1, 1)
    assert s.stats()["num_preemptions_total"] == 1
    while s.num_waiting:
        plan, outputs = step(s, 9)
    # All it had, prompt and six outputs, is computed again; nothing is emitted twice.
    assert shape(plan)[-1] == ("b", 0, 13, True)
    assert plan.items[-1].tokens[7:] == (7,) * 6
    assert [len(o.tokens) for o in outputs if o.request_id == "b"] == [1]


def test_preempted_requests_come_back_in_order_of_arrival():
    s = make(num_pages=8, prefix_caching=False)
    for name in "abcd":
        s.add(request(name, 7, max_tokens=20))
    order = []
    while s.has_work:
        _plan, outputs = step(s)
        order += [o.request_id for o in outputs if o.finish_reason]
    assert order == ["a", "b", "c", "d"]
    assert s.stats()["num_preemptions_total"] > 0


def test_prefix_hits_leave_a_token_to_compute():
    s = make()
    prompt = list(range(16))
    s.add(request("a", prompt, max_tokens=1))
    _, (output,) = step(s)
    assert output.num_cached_tokens == 0
    s.add(request("b", prompt, max_tokens=1))
    plan, (output,) = step(s)
    assert shape(plan) == [("b", 12, 4, True)]
    assert output.num_cached_tokens == 12
    s.add(request("c", [*prompt, 99], max_tokens=1))
    assert shape(step(s)[0]) == [("c", 16, 1, True)]
    stats = s.stats()
    assert stats["prefix_cache_queries_total"] == 16 + 16 + 17
    assert stats["prefix_cache_hits_total"] == 0 + 12 + 16


def test_outputs_are_cached_too():
    s = make()
    s.add(request("a", [1, 2, 3, 4, 5], max_tokens=8))
    run(s, range(10, 30))
    s.add(request("b", [1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17, 50], max_tokens=1))
    assert step(s)[1][0].num_cached_tokens == 12


def test_requests_of_one_plan_do_not_share_what_it_has_yet_to_compute():
    s = make()
    for name in "ab":
        s.add(request(name, 12, max_tokens=1))
    assert shape(step(s)[0]) == [("a", 0, 12, True), ("b", 0, 12, True)]


def test_prefix_caching_can_be_switched_off():
    s = make(prefix_caching=False)
    for name in "ab":
        s.add(request(name, 12, max_tokens=1))
        assert step(s)[1][0].num_cached_tokens == 0
    assert s.stats()["prefix_cache_queries_total"] == s.stats()["pages_cached"] == 0


@pytest.mark.parametrize("when", ["waiting", "planned", "launched", "running"])
def test_abort_frees_pages_at_once(when):
    s = make(max_num_seqs=2)
    s.add(request("keep"))
    s.add(request("gone", 9))
    plan = None
    if when != "waiting":
        plan = s.plan()
    if when in ("launched", "running"):
        s.advance(plan)
    if when == "running":
        s.observe(plan, [Sampled(1)] * 2)
    assert s.abort("gone")
    assert not s.abort("gone")
    assert s.pool.num_used == (0 if when == "waiting" else 2)
    if when == "planned":
        s.advance(plan)
    if when in ("planned", "launched"):
        outputs = s.observe(plan, [Sampled(1)] * 2)
        assert [o.request_id for o in outputs] == ["keep"]
    assert [i.request.id for i in step(s)[0].items] == ["keep"]
    s.add(request("gone", 3))  # the id is free again
    assert "gone" in [i.request.id for i in step(s)[0].items]


@pytest.mark.parametrize("ahead", [False, True])
def test_broken_logits_end_their_request_alone_and_leave_no_prefix(ahead):
    s = make()
    s.add(request("good", range(9), max_tokens=3))
    s.add(request("bad", range(100, 109)))
    plan = s.plan()
    s.advance(plan)
    if ahead:  # the step after is launched before this one is read
        later = s.plan()
        s.advance(later)
    good, bad = s.observe(plan, [Sampled(7), Sampled(BROKEN)])
    assert (good.tokens, good.finish_reason) == ((Sampled(7),), None)
    assert (bad.tokens, bad.finish_reason) == ((), "error") and "not finite" in bad.error
    if ahead:
        (again,) = s.observe(later, [Sampled(8), Sampled(BROKEN)])
        assert again.request_id == "good"
    s.add(request("same", range(100, 109), max_tokens=1))
    assert ("same", 0, 9, True) in shape(step(s)[0])
    while s.has_work:
        step(s)
    assert s.pool.num_used == 0


def test_broken_logits_of_a_preempted_request_leave_no_prefix():
    s = make(num_pages=5)
    s.add(request("good", range(8), max_tokens=3))
    s.add(request("bad", range(100, 109)))
    plan = s.plan()
    s.advance(plan)
    later = s.plan()
    assert shape(later) == [("good", 8, 1, True)]  # "bad" gave its pages, and its token is not read
    s.advance(later)
    assert [o.finish_reason for o in s.observe(plan, [Sampled(7), Sampled(BROKEN)])] == [
        None,
        "error",
    ]
    s.observe(later, [Sampled(7)])
    while s.has_work:
        step(s)
    s.add(request("same", range(100, 109), max_tokens=1))
    assert shape(step(s)[0]) == [("same", 0, 9, True)]
    assert s.pool.num_used == 0


def test_a_refused_request_can_be_aborted():
    s = make()
    s.add(request("big", 200))
    assert s.abort("big")
    assert not s.has_work


def test_outputs_go_along_only_where_penalties_need_them():
    s = make()
    s.add(request("a", 3, emitted=(40, 41)))
    s.add(request("b", 3, emitted=(40, 41), presence_penalty=0.5))
    step(s, 42)
    plain, penal = step(s)[0].items
    assert (plain.num_outputs, plain.output_ids) == (3, ())
    assert (penal.num_outputs, penal.output_ids) == (3, (40, 41, 42))


def test_queue_time_ends_with_the_first_plan():
    clock = count(100.0, 0.5)
    s = make(max_num_seqs=1, clock=lambda: next(clock))
    s.add(request("a", max_tokens=2))  # 100
    s.add(request("b", max_tokens=2))  # 100.5
    outputs = [o for _ in range(4) for o in step(s)[1]]  # 101, 101.5
    assert [o.queue_seconds for o in outputs] == [1.0, 0.0, 1.0, 0.0]


def test_stats():
    s = make(max_num_batched_tokens=10, max_num_seqs=2, num_pages=10)
    s.add(request("a", 4, max_tokens=9))
    s.add(request("b", 9))
    s.add(request("c", 5))
    step(s)
    stats = s.stats()
    assert stats["num_requests_running"] == 2
    assert stats["num_requests_waiting"] == 1
    assert stats["queued_tokens"] == 3 + 5
    assert stats["kv_cache_usage_perc"] == 0.3
    assert stats["pages_used"] + stats["pages_cached"] + stats["pages_free"] == 10
    assert (stats["prompt_tokens_total"], stats["generation_tokens_total"]) == (4, 1)
    step(s)
    stats = s.stats()
    assert (stats["prompt_tokens_total"], stats["generation_tokens_total"]) == (13, 3)


def test_misuse_is_refused():
    s = make()
    s.add(request("a"))
    with pytest.raises(ValueError, match="already open"):
        s.add(request("a"))
    old = s.plan()
    new = s.plan()
    with pytest.raises(ValueError, match="made last"):
        s.advance(old)
    s.advance(new)
    with pytest.raises(ValueError, match="made last"):
        s.advance(new)
    with pytest.raises(ValueError, match="oldest"):
        s.observe(old, [Sampled(1)])
    with pytest.raises(ValueError, match="1 items, got 2"):
        s.observe(new, [Sampled(1)] * 2)
    with pytest.raises(ValueError, match="got no token"):
        s.observe(new, [None])
