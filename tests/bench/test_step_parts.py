"""Phases of traced steps, and the cases and tables of a step's parts, against sums by hand."""

import io

import pytest
from rich.console import Console, Group

from crossdock.bench.engine_parts import step_cases
from crossdock.bench.parts_table import parts_tables
from crossdock.bench.step_phases import first_steps, phases
from crossdock.core.ceilings import Ceilings
from crossdock.core.messages import Traced

MS = 1_000_000
CEILINGS = Ceilings(2e9, 1e9, "mine.toml")


def traced(rank, dispatch, device=True):
    """Step 1 has a prompt on rank 1 alone; step 2 none. Each has two dispatches."""
    intervals, at = [], 0
    for step, took in ((1, dispatch[:2]), (2, dispatch[2:])):
        begin = at
        for ms in took:
            intervals.append((step, "dispatch", at, at + ms * MS))
            intervals.append((step, "experts", at + ms * MS, at + (ms + 2) * MS))
            at += (ms + 3) * MS
        if device:
            intervals.append((step, "device", begin, at))
            intervals.append((step, "agree", begin, begin + MS))
        intervals.append((step, "step", begin, at + (9 * MS if device else 0)))
    steps = ((1, 9 if rank else 3, 3, 10**6, 10**3), (2, 3, 3, 10**5, 10**4))
    return Traced(rank, 1, tuple(intervals), steps)


def test_a_phase_is_a_mean_over_its_steps_and_ranks():
    found = phases([traced(0, (1, 5, 2, 2)), traced(1, (4, 2, 2, 3))])
    assert list(found) == ["prefill", "decode"]
    assert found["prefill"]["steps"] == found["decode"]["steps"] == 1
    parts = found["prefill"]["parts_ms"]
    assert parts == pytest.approx({"step": 12, "dispatch": 6, "experts": 4, "wait": 3})
    parts = found["decode"]["parts_ms"]  # a wait exchange by exchange: 0 + 0 and 0 + 1
    assert parts == pytest.approx({"step": 10.5, "dispatch": 4.5, "experts": 4, "wait": 0.5})
    assert found["prefill"]["flops_per_s"] == pytest.approx(2e6 / 24e-3)
    assert found["decode"]["bytes_per_s"] == pytest.approx(2e4 / 21e-3)


def test_without_a_device_a_step_is_the_hosts_and_waits_are_as_they_were_seen():
    found = phases([traced(0, (1, 5, 2, 2), device=False)])
    assert list(found) == ["decode"] and found["decode"]["steps"] == 2
    assert "wait" not in found["decode"]["parts_ms"]
    assert found["decode"]["parts_ms"]["step"] == pytest.approx((12 + 10) / 2)


def test_the_first_steps_are_kept_with_what_is_theirs():
    kept = first_steps(traced(0, (1, 5, 2, 2)), 1)
    assert [size[0] for size in kept.steps] == [1]
    assert {interval[0] for interval in kept.intervals} == {1}


def rank(step, calls, **seconds):
    counters = {"timed_ns": 5 * 10**8, "timed_flops": 10**8, "timed_bytes": 2 * 10**8}
    return {"seconds": {"step": step, **seconds}, "calls": {"step": calls}, "counters": counters}


def test_cases_are_shares_of_step_and_ceiling():
    untimed = {"seconds": {}, "calls": {}, "counters": {"steps": 3}}
    answers = [
        {"parts": [rank(2.0, 10, dispatch=0.5, combine=0.1, wait=0.2), untimed]},
        {"parts": [rank(4.0, 10, dispatch=1.0, experts=1.0)]},
    ]
    cases = {case.name: case for case in step_cases(answers, None, CEILINGS, {"variant": "x"})}
    assert cases["exposed_communication"].median == pytest.approx((0.3 + 0.25) / 2)
    assert cases["mfu"].median == pytest.approx(0.1) and cases["mfu"].n == 2
    assert cases["mbu"].median == pytest.approx(0.4)
    step = cases["step"]
    assert step.median == pytest.approx(300) and step.more["steps"] == 20
    assert step.more["parts_ms"] == pytest.approx(
        {"dispatch": 75, "combine": 5, "experts": 50, "wait": 10, "other": 170}
    )
    assert "phases" not in step.more


def test_too_few_steps_for_a_timed_one_are_taken_from_the_traced_turn():
    untimed = {"seconds": {}, "calls": {}, "counters": {"steps": 3}}
    both = [traced(0, (1, 5, 2, 2)), traced(1, (4, 2, 2, 3))]
    turn = {"parts": [rank(3.0, 2, host_gap=0.3)], "phases": phases(both)}
    shape = {"variant": "x"}
    cases = list(step_cases([{"parts": [untimed]}], turn, CEILINGS, shape))
    assert cases[0].more["parts_ms"] == pytest.approx({"host_gap": 150, "other": 1350})
    decode = cases[0].more["phases"]["decode"]
    assert decode["mbu"] == pytest.approx(decode["bytes_per_s"] / 1e9)
    text = io.StringIO()
    Console(file=text, width=100).print(Group(*parts_tables(cases, lambda case: "x")))
    shown = text.getvalue()
    assert "host_gap" in shown and "x: decode (1)" in shown and "mine.toml" in shown
    assert "wait, within or beside others" in shown


def test_one_without_any_has_no_case_but_is_no_error():
    untimed = {"seconds": {}, "calls": {}, "counters": {"steps": 3}}
    assert list(step_cases([{"parts": [untimed]}], None, CEILINGS, {"variant": "x"})) == []
