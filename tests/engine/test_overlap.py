"""Cutting a batch in two, choosing a mode, and what is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.core import ConfigError, EngineConfig, Plan, Request, SamplingParams, Scheduled
from crossdock.core.batch import GraphSize
from crossdock.core.hf_config import load_spec
from crossdock.engine import agree, check_overlap
from crossdock.engine.drive import drive_both
from crossdock.engine.overlap import OverlapPolicy, Rung, forced, halve, middle, refusals
from crossdock.engine.overlap_measure import choose_rung, pays

STORYTELLER = Path(__file__).parents[2] / "checkpoints" / "storyteller"


def plan_of(lens, starts=None, page=4):
    items = []
    for i, n in enumerate(lens):
        start = starts[i] if starts else 0
        request = Request(str(i), (0,) * 99, SamplingParams())
        pages = tuple(range(100 * i, 100 * i + -(-(start + n) // page)))
        items.append(Scheduled(request, start, tuple(range(start, start + n)), pages, i % 3 > 0))
    return Plan(tuple(items))


def test_a_cut_falls_between_sequences_where_that_is_about_the_middle():
    assert middle([1] * 8) == 4
    assert middle([1] * 7) in (3, 4)
    assert middle([1, 1, 30, 31]) == 32
    assert middle([1, 1, 100]) == 51  # inside the long one
    assert middle([100]) == 50
    assert middle([3]) == 2
    assert middle([2, 5]) == 4  # one token alone behind the two would look like a decode
    assert middle([1]) in (0, 1) and middle([]) == 0


def test_halves_hold_the_plan_in_its_order_with_decodes_first():
    draw = random.Random(5)
    for _ in range(300):
        lens = [1] * draw.randrange(6)
        lens += [draw.randrange(2, 40) for _ in range(draw.randrange(4))]
        plan = plan_of(lens, [draw.randrange(50) for _ in lens])
        cut = middle(lens)
        first, second = halve(plan, cut, 4)
        assert (first.num_tokens, second.num_tokens) == (cut, plan.num_tokens - cut)
        both = first.items + second.items
        for item in plan.items:
            parts = [p for p in both if p.request is item.request]
            assert sum((p.tokens for p in parts), ()) == item.tokens
            assert [p.start for p in parts] == [p.tokens[0] for p in parts]
            assert [p.sample for p in parts] == [False] * (len(parts) - 1) + [item.sample]
            for part in parts:  # the pages of all tokens so far, and no more
                needed = -(-(part.start + len(part.tokens)) // 4)
                assert part.pages == item.pages[:needed]
        sampling = [i.request.id for i in plan.items if i.sample]
        assert [p.request.id for p in both if p.sample] == sampling
        for half in (first, second):
            counts = [len(item.tokens) for item in half.items]
            assert counts[: half.num_decodes] == [1] * half.num_decodes


AUTO = OverlapPolicy(
    "auto", (Rung(0, "off"), Rung(16, "sbo"), Rung(64, "sbo", True), Rung(256, "off", True)), ""
)


def test_the_mode_is_that_of_the_size_measured_last():
    assert AUTO.choose(15, 8, 8) == "off"
    assert AUTO.choose(63, 32, 32) == "sbo"
    assert AUTO.choose(64, 32, 32) == "tbo"
    assert AUTO.choose(64, 64, 0) == "sbo"  # nobody has a second half
    assert AUTO.choose(64, 64, 60) == "sbo"  # halves of ranks that do not line up
    assert AUTO.choose(1000, 1000, 1000) == "off"
    assert forced("tbo").choose(64, 64, 60) == "tbo"
    assert forced("tbo").choose(1, 0, 1) == "off"
    assert forced("sbo").choose(1, 0, 1) == "sbo"


def test_all_ranks_agree_on_the_largest_half_of_any():
    table = [(1, 3, 0, 0, 0), (1, 3, 70, 40, 1), (0, 3, 64, 32, 0)]
    agreed = agree(table, AUTO)
    assert (agreed.overlap, agreed.most_tokens, agreed.run) == ("tbo", 40, True)
    agreed = agree([(1, 3, 0, 0, 0), (1, 3, 20, 10, 0)], AUTO)
    assert (agreed.overlap, agreed.most_tokens) == ("sbo", 20)
    agreed = agree([(0, 3, 0, 0, 0), (0, 3, 0, 0, 0)], forced("tbo"))
    assert (agreed.run, agreed.sleep, agreed.overlap) == (False, True, "off")


def test_all_ranks_replay_one_graph_or_none():
    def fit(need: int, tokens: int) -> GraphSize | None:
        rows = next((rows for rows in (32, 96) if rows >= max(need, tokens)), None)
        return None if rows is None else GraphSize(need > 0, rows, halves=need != 69)

    def run(table, policy=AUTO):
        agreed = agree(table, policy, fit)
        return agreed.graph and agreed.graph[:2], agreed.most_tokens, agreed.overlap

    decodes = (1, 3, 20, 10, 0)
    assert run([decodes, (0, 3, 0, 0, 0)]) == ((False, 32), 32, "sbo")
    assert run([decodes, (1, 3, 70, 35, 0)]) == ((False, 96), 96, "tbo")
    assert run([decodes, (1, 3, 7, 7, 7)]) == ((True, 32), 32, "sbo")  # a rank has a prompt
    assert run([decodes, (1, 3, 70, 35, 70)]) == ((True, 96), 96, "tbo")
    assert run([decodes, (1, 3, 69, 34, 69)]) == (None, 35, "tbo")  # too small to be halved
    # Few tokens that see many cached keys.
    assert run([decodes, (1, 3, 7, 7, 40)], forced("off")) == ((True, 96), 96, "off")
    assert run([(1, 3, 97, 49, 0)])[0] is None  # more than any graph has


def test_a_mode_pays_only_if_it_clearly_does():
    base = [1.0, 1.1, 1.3, 0.9, 1.0]
    assert pays([0.9 * t for t in base], base)
    assert pays([*(0.9 * t for t in base[:4]), 5.0], base)  # one disturbed repeat
    assert not pays([0.99 * t for t in base], base)
    assert not pays([*(0.9 * t for t in base[:3]), 5.0, 5.0], base)
    assert not pays(base, base)


def test_halves_must_beat_the_best_of_whole_batches():
    one = [1.0] * 5
    half = [0.5] * 5
    most = [0.6] * 5
    choose = lambda usual, **times: choose_rung(32, times, usual)  # noqa: E731
    assert choose("off", off=one, sbo=half, tbo=most).whole == "sbo"
    assert not choose("off", off=one, sbo=half, tbo=most).halves
    assert choose("off", off=one, sbo=most, tbo=half).halves
    assert choose("off", off=one, tbo=half) == Rung(32, "off", True, {"off": 1e3, "tbo": 500.0})
    assert choose("sbo", off=one, sbo=one, tbo=one).whole == "sbo"
    assert choose("sbo", off=half, sbo=one, tbo=one).whole == "off"
    assert choose("off", off=one, sbo=one, tbo=one).whole == "off"


def config_of(**fields):
    return EngineConfig(str(STORYTELLER), **{"ranks": 2, "transport": "shm", **fields})


def test_what_cannot_run_is_refused_with_the_reason(tmp_path):
    spec = load_spec(STORYTELLER)
    for overlap in ("auto", "off", "sbo", "tbo"):
        check_overlap(config_of(overlap=overlap), spec)
        check_overlap(config_of(overlap=overlap, invariant=True), spec)
    for overlap in ("sbo", "tbo"):
        with pytest.raises(ConfigError, match=f"'{overlap}' cannot run: no rows travel on one"):
            check_overlap(config_of(overlap=overlap, ranks=1, transport="auto"), spec)
        with pytest.raises(ConfigError, match="no layer has experts"):
            check_overlap(config_of(overlap=overlap), replace(spec, moe_layers=()))
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 1"):
        check_overlap(config_of(overlap="tbo", max_num_batched_tokens=1), spec)
    config = json.loads((STORYTELLER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_shared_experts": 0}))
    bare = load_spec(tmp_path)
    with pytest.raises(ConfigError, match=r"no shared expert.*; set it to off, tbo or auto"):
        check_overlap(config_of(overlap="sbo"), bare)
    assert set(refusals(config_of(), bare)) == {"sbo"}
    check_overlap(config_of(overlap="tbo"), bare)


def test_a_single_rank_over_nvlink_has_rows_to_overlap():
    assert not refusals(config_of(ranks=1, transport="nvlink"), load_spec(STORYTELLER))


def test_forwards_take_turns_and_may_be_of_unequal_length():
    seen = []

    def forward(name, steps):
        for step in range(steps):
            seen.append((name, step))
            yield
        return name

    assert drive_both(forward("a", 3), forward("b", 1)) == ["a", "b"]
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
