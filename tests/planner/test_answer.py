"""Whole answers with the real prices."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from crossdock.core import CapacityError, ConfigError, EngineConfig
from crossdock.core.config import load_toml
from crossdock.planner import (
    Question,
    Workload,
    answer_question,
    checklist,
    document,
    draw,
    explain,
    formats_of,
    load_hardware,
    load_model,
    parse_observed,
    render,
    simulate,
    simulation,
    variants,
)
from crossdock.planner.answer_document import commands, usd_text, why
from crossdock.planner.calibration import DEFAULT
from crossdock.planner.commands import missing_here, missing_in_layout, redundant_experts
from crossdock.planner.layout import Layout
from crossdock.planner.plot import check_plot, pareto
from crossdock.planner.search_pricing import CostPricing


def question(model="deepseek-v3", gpu="h100", gpus=96, isl=2000, osl=100, price=None, **work):
    spec = load_model(model)
    limits = {"ttft_s": 5.0, "tpot_s": 0.1, "zipf": DEFAULT.real_traffic_zipf, **work}
    return Question(
        model=model,
        spec=spec,
        hardware=load_hardware(gpu),
        work=Workload(isl, osl, **limits),
        formats=formats_of(spec, None, None),
        gpus=gpus,
        price=price,
    )


@pytest.fixture(scope="module")
def large():
    return answer_question(question(price=2.0))


@pytest.fixture(scope="module")
def small():
    return answer_question(question("qwen3-30b-a3b", "h200", 8, 1000, 500))


def text_of(renderable) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_deepseek_v3_on_96_h100(large):
    """Experts over ranks before tensor parallelism; prefill EP32 or wider in normal mode; decode
    low-latency, and wider where it is not held back by what prefill sends."""
    best = large.best
    assert best.kind == "split" and best.experts == "ep" and best.gpus <= 96
    prefill, decode = best.prefill.point.layout, best.decode.point.layout
    assert prefill.gpus >= 32 and prefill.mode == "normal" and prefill.tp == 1
    assert decode.gpus >= 32 and decode.mode == "low_latency" and decode.tp == 1
    alone = {name: point.layout for name, point in large.roles.items()}
    assert alone["prefill"].gpus >= 32 and alone["prefill"].mode == "normal"
    assert alone["decode"].gpus > alone["prefill"].gpus
    assert alone["decode"].mode == "low_latency"
    assert large.tensor_parallel.rate < best.rate
    assert best.ttft_s <= 5.0 and best.tpot_s <= 0.1
    assert large.seconds < 30


def test_throughput_is_consistent(large):
    best, work = large.best, large.question.work
    assert best.rate == best.capacity
    sides = [s.point.requests_per_gpu_s * s.gpus for s in (best.prefill, best.decode)]
    assert best.capacity <= min(sides) * (1 + 1e-9)
    made = document(large)["recommended"]
    assert made["output_tokens_per_s_per_gpu"] == pytest.approx(best.rate * work.osl / best.gpus)
    dollars = 2.0 * best.gpus / 3600 / (best.rate * work.osl) * 1e6
    assert made["usd_per_million_output_tokens"] == pytest.approx(dollars)


def test_small_rates_and_money_keep_their_digits():
    answer = answer_question(
        question("mixtral-8x7b", "h200", 8, 1000, 500, price=7e-7, request_rate=4e-4)
    )
    made, text = document(answer)["recommended"], " ".join(text_of(render(answer)).split())
    rates = re.search(r"([\d.]+) input and ([\d.]+) output tokens/s per GPU, ([\d.]+)", text)
    money = re.search(r"\$([\d.]+) per million output tokens, \$([\d.]+) per million", text)
    for said, name in zip(
        (*rates.groups(), *money.groups()),
        (
            "input_tokens_per_s_per_gpu", "output_tokens_per_s_per_gpu", "tokens_per_s_per_user",
            "usd_per_million_output_tokens", "usd_per_million_tokens",
        ),
        strict=True,
    ):  # fmt: skip
        assert float(said) == pytest.approx(made[name], rel=0.006)
    assert f"= {usd_text(made['usd_per_million_output_tokens'])} per million" in "\n".join(
        line for lines in explain(answer).values() for line in lines
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "$0"), (0.00312, "$0.00312"), (0.3456, "$0.346"), (2, "$2.00"), (12345.678, "$12,345.68")],
)
def test_money(value, said):
    assert usd_text(value) == said


def test_every_plan_states_the_error_of_its_kind(large):
    assert set(large.errors) == {"prefill", "decode"}
    assert all(0 < error < 0.5 for error in large.errors.values())
    for role, error in large.errors.items():
        assert f"{role} {error:.0%}" in text_of(render(large))


def test_the_document_is_json_and_says_all(large):
    made = json.loads(json.dumps(document(large)))
    assert {"recommended", "runners_up", "memory", "commands", "median_error"} <= set(made)
    step = made["step_ms"]["decode"]
    assert sum(step["parts"].values()) - step["hidden"] == pytest.approx(step["total"])
    memory = made["memory"]["prefill"]
    assert sum(memory["parts"].values()) == memory["sum"] <= memory["budget"]
    assert made["smallest_ep"] == {"ranks": 13, "even": 16}
    assert made["recommended"]["missing_in_this_version"]


def test_what_this_version_cannot_run_is_marked_with_the_best_it_can(large, small):
    missing = missing_here(large.best, large.question.spec, large.question.hardware)
    assert "an instance over several nodes" in missing
    assert large.runnable is None and "short by" in large.not_runnable
    assert small.runnable is not None and small.runnable.kind == "together"
    q = small.question
    assert not missing_here(small.runnable, q.spec, q.hardware)
    assert small.runnable.gpus <= 8
    text = text_of(render(small))
    assert "not runnable with this version" in text and "the best that it runs" in text


def test_fp8_weights_run_where_the_gpu_multiplies_them():
    answer = answer_question(question(gpu="h200", gpus=8))
    assert answer.runnable is answer.best and answer.best.gpus == 8
    (settings, _) = [c.line for c in commands(answer) if c.engine == "crossdock"]
    assert "quantize" not in settings  # the checkpoint is quantised
    layout = answer.best.decode.point.layout
    assert layout.weights_dtype == "float8_e4m3fn"
    missing = missing_in_layout(layout, answer.question.spec, load_hardware("a100"))
    assert "weights kept in float8_e4m3fn" in missing

    q = question("qwen3-30b-a3b", "h200", 8, 1000, 500)
    q = replace(q, formats=formats_of(q.spec, "fp8", None))
    (settings, _) = [c.line for c in commands(answer_question(q)) if c.engine == "crossdock"]
    assert 'quantize = "fp8"' in settings and 'rebalance = "auto"' in settings


def test_what_no_layout_makes_runnable_is_named(large):
    layout, spec = large.best.decode.point.layout, large.question.spec
    for hardware, changed, wanted in (
        ("h200", {"architecture": "Glm4MoeForCausalLM"}, "architecture Glm4MoeForCausalLM"),
        ("mi300x", {}, "GPUs of AMD"),
    ):
        assert wanted in missing_in_layout(
            layout, replace(spec, **changed), load_hardware(hardware)
        )
    fp8_kv = replace(layout, weights_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert "KV in float8_e4m3fn" in missing_in_layout(fp8_kv, spec, load_hardware("a100"))
    assert "KV in float8_e4m3fn" not in missing_in_layout(fp8_kv, spec, load_hardware("h200"))


def test_crossdocks_own_command_is_one_it_accepts(small, tmp_path):
    settings, serve = [c.line for c in commands(small) if c.engine == "crossdock"]
    path = tmp_path / "plan.toml"
    path.write_text("\n".join(settings.splitlines()[1:-1]))
    values = load_toml(path)
    ranks = int(re.search(r"--ranks (\d+)", serve)[1])
    assert EngineConfig(model="m", ranks=ranks, **values).max_num_seqs >= 1
    assert ranks == small.runnable.prefill.point.layout.gpus


def test_flags_of_other_engines_agree_with_the_layout(large):
    made = [command for command in commands(large) if command.engine.startswith("SGLang")]
    lines = {command.where.split(":")[0]: command.line for command in made}
    layout, spec = large.best.prefill.point.layout, large.question.spec
    line = lines["prefill"]
    assert f"--tp-size {layout.gpus} " in line and f"--ep-size {layout.gpus} " in line
    assert f"--nnodes {layout.gpus // 8} " in line and "--deepep-mode normal" in line
    redundant = int(re.search(r"--ep-num-redundant-experts (\d+)", line)[1])
    assert (spec.moe.num_experts + redundant) % layout.gpus == 0
    chunk = int(re.search(r"--chunked-prefill-size (\d+)", line)[1])
    assert chunk == large.best.prefill.point.batch * layout.gpus
    vllm = [c.line for c in commands(large) if c.engine.startswith("vLLM")]
    assert len(vllm) == 2 and all("--enable-expert-parallel" in line for line in vllm)
    assert "deepep_high_throughput" in vllm[0] and "deepep_low_latency" in vllm[1]


def test_one_backend_of_vllm_takes_prefills_steps_too():
    found = answer_question(question("qwen3-30b-a3b", "h100", 4, 2000, 200))
    modes = [side.point.layout.mode for side in (found.best.prefill, found.best.decode)]
    assert found.best.kind == "together" and modes == ["normal", "low_latency"]
    (line,) = [c.line for c in commands(found) if c.engine.startswith("vLLM")]
    assert "--all2all-backend deepep_high_throughput " in line


@pytest.mark.parametrize(("gpus", "redundant", "slots"), [(32, 1, 288), (72, 0, 288), (13, 0, 260)])
def test_redundant_experts_fill_the_slots(gpus, redundant, slots):
    layout = Layout("decode", gpus, redundant_per_rank=redundant)
    assert redundant_experts(layout, load_model("deepseek-v3")) == slots - 256


def test_too_few_gpus_are_refused_with_the_arithmetic():
    with pytest.raises(CapacityError, match=r"short by .* GiB(?s:.)*653\.9e9(?s:.)*13 GPUs"):
        answer_question(question(gpus=8))


def test_gpus_that_no_instance_takes_are_named():
    with pytest.raises(CapacityError, match=r"13 given, of which an instance takes 8\b"):
        answer_question(question(gpus=13))


def test_what_only_experts_by_tp_could_serve_is_refused_for_what_is_short():
    with pytest.raises(CapacityError, match=r"not for both: raise --gpus(?s:.)*by TP8") as error:
        answer_question(question("deepseek-v3", "h20", 8, 1500, 200))
    assert "--tpot" not in str(error.value)


def test_a_rate_beyond_the_gpus_is_refused_with_what_is_missing():
    with pytest.raises(CapacityError, match=r"overloads 16 GPUs.*short by .* requests/s"):
        answer_question(question("qwen3-30b-a3b", "h200", 16, 1000, 500, request_rate=5000.0))


def test_a_rate_alone_finds_its_gpus():
    found = answer_question(question("mixtral-8x7b", "h100", None, 1000, 50, request_rate=1000.0))
    assert found.best.rate == 1000.0 and not found.best.overloaded
    assert max(found.best.prefill.load, found.best.decode.load) <= 0.9


def test_neither_gpus_nor_rate_is_refused():
    with pytest.raises(ConfigError, match="--gpus"):
        question(gpus=None)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(ConfigError, match="36,260 too many"):
        question(isl=200_000)


def test_fp8_kv_holds_more(small):
    q = small.question
    half = replace(q, formats=formats_of(q.spec, None, "fp8"))
    assert answer_question(half).memory["decode"].kv_bytes_per_token * 2 == (
        small.memory["decode"].kv_bytes_per_token
    )
    with pytest.raises(ConfigError, match="expected bf16 or fp8"):
        formats_of(q.spec, None, "int4")


def test_explanations_come_to_what_the_plan_says(large):
    lines = explain(large)
    step = next(line for line in lines["Decode step"] if line.startswith("step = "))
    assert f"{large.best.decode.point.step.total * 1e3:,.3f} ms" in step
    ttft = next(line for line in lines["From steps to requests"] if line.startswith("TTFT"))
    assert ttft.endswith(f"{large.best.ttft_s * 1e3:,.1f} ms")
    assert all(lines.values())


def test_pages_waste_by_the_lengths_given(large):
    whole = explain(large, np.full(10, 64))["KV pages"]
    assert "0.00% expected" in whole[0] and "0.00% expected" in whole[1]
    assert "0.00% expected" not in explain(large, np.full(10, 65))["KV pages"][1]


def test_the_checklist_answers_seven_questions_with_numbers(large):
    items = checklist(large)
    assert len(items) == 7 and all(re.search(r"\d", item.answer) for item in items)
    assert "EP13" in items[0].answer and "EP16" in items[0].answer
    assert {item.verdict for item in items} <= {"good", "look", "bad"}


def metrics(dispatch: float, even: float) -> str:
    return "\n".join(
        [
            "# HELP crossdock:step_seconds_total Seconds.",
            f'crossdock:step_seconds_total{{part="dispatch"}} {dispatch}',
            'crossdock:step_seconds_total{part="combine"} 1.0',
            'crossdock:step_seconds_total{part="wait"} 9.0',
            'crossdock:step_seconds_total{part="experts"} 4.0',
            'crossdock:step_seconds_total{part="step"} 8.0',
            f'crossdock:expert_balancedness{{layer="1"}} {even}',
            f'crossdock:expert_balancedness{{layer="2"}} {even}',
            "crossdock:kv_page_size_tokens 16",
            'crossdock:kv_pages{state="used"} 10',
            'crossdock:kv_pages{state="cached"} 5',
            'crossdock:kv_pages{state="free"} 85',
            "crossdock:kv_pages_reserved 0",
            "crossdock:kv_tokens 120",
            "crossdock:decode_tpgs 12.5",
        ]
    )


def test_a_running_servers_metrics_are_read(large):
    seen = parse_observed(metrics(3.0, 0.5))
    assert seen.exchange_share == pytest.approx(0.5) and seen.imbalance == pytest.approx(2.0)
    assert seen.kv.rounding == pytest.approx(0.25) and seen.output_tokens_per_s_per_gpu == 12.5
    items = {item.question: item for item in checklist(large, seen)}
    assert items["Is balance monitored"].verdict == "bad"
    assert "50%" in items["Is the all-to-all the decode bottleneck"].answer
    with pytest.raises(ConfigError, match="crossdock server"):
        parse_observed("vllm:num_requests_running 1\n")


def test_more_skew_is_more_imbalance():
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")
    layout = Layout("decode", 32, redundant_per_rank=1)
    uneven = [
        CostPricing(spec, hardware, Workload(2000, 100, zipf=zipf)).imbalance(layout, 128)
        for zipf in (0.0, 0.4, 0.8)
    ]
    assert 1.0 <= uneven[0] < uneven[1] < uneven[2] < 32
    pricing = CostPricing(spec, hardware, Workload(2000, 100, zipf=0.4))
    assert pricing.imbalance(layout, 8) > pricing.imbalance(layout, 512)
    assert pricing.imbalance(Layout("decode", 1), 8) == 1.0


def test_normal_mode_in_decode_pays_for_launches():
    spec, hardware = load_model("deepseek-v3"), load_hardware("h100")
    pricing = CostPricing(spec, hardware, Workload(2000, 100))
    layout = Layout("decode", 32, weights_dtype="float8_e4m3fn")
    plain = pricing.step(layout, "decode", 32, 2050)
    assert plain.parts["uncaptured_launches"] > 0
    assert "uncaptured_launches" not in pricing.step(layout, "prefill", 8192, 1000).parts
    low = pricing.step(replace(layout, mode="low_latency"), "decode", 32, 2050)
    assert "uncaptured_launches" not in low.parts


def test_the_frontier_falls_and_the_plan_lies_below_it(large):
    line = pareto(large, "ep")
    speeds, rates = [p.speed for p in line], [p.throughput for p in line]
    assert speeds == sorted(speeds) and rates == sorted(rates, reverse=True)
    best, work = large.best, large.question.work
    above = [p.throughput for p in line if p.speed >= 1 / best.tpot_s * 0.98]
    assert max(above) * 1.02 >= best.rate * work.osl / best.gpus


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(small, tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    check_plot(path)
    draw(small, path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") or b"<?xml" in head
    with pytest.raises(ConfigError, match="ending in"):
        check_plot(tmp_path / "plan.gif")


@pytest.fixture(scope="module")
def short():
    """Long prompts and short answers on few GPUs: a load that is soon simulated."""
    return answer_question(question("mixtral-8x7b", "h100", 4, 4000, 10))


def test_a_simulation_of_half_the_load_is_steady_and_as_planned(short):
    rate = short.best.rate / 2
    result = simulate(simulation(short, f"poisson:{rate}:20"))
    assert result.verdict == "steady"
    assert result.request_rate == pytest.approx(rate, rel=0.25)
    assert result.tpot_s.mean <= short.best.tpot_s * 1.3


def test_a_simulation_beyond_capacity_is_called_overloaded(short):
    result = simulate(simulation(short, f"poisson:{short.best.capacity * 1.6}:20"))
    assert result.verdict == "overloaded" and result.output_rate is None


@pytest.mark.parametrize("traffic", ["poisson:", "poisson:0", "poisson:1:2:3", "poisson:x", "none"])
def test_traffic_that_is_none_is_refused(small, traffic):
    with pytest.raises(ConfigError):
        simulation(small, traffic)


def test_traffic_without_a_request_is_refused(small):
    with pytest.raises(ConfigError, match="no request arrives within 10 s; simulate longer"):
        simulation(small, "poisson:0.0001:10")


def test_the_same_traffic_is_compared_otherwise(large):
    config = simulation(large, "poisson:50:10")
    assert set(variants(config, "rebalancing")) == {"rebalanced", "as placed"}
    assert set(variants(config, "overlap")) == {"off", "sbo", "tbo"}
    instances = large.best.prefill.instances + large.best.decode.instances
    mixed = variants(config, "ratio")
    assert len(mixed) == instances - 1
    for other in mixed.values():
        assert other.arrivals == config.arrivals
        assert sum(pool.instances for pool in other.pools) == instances
    with pytest.raises(ConfigError, match="rebalancing, overlap or ratio"):
        variants(config, "weather")


def test_a_group_that_serves_both_has_one_memory_plan(short):
    assert short.best.kind == "together"
    plan = short.memory["decode"]
    assert plan is not None and plan == short.memory["prefill"] and plan.layout.role == "both"
    assert short.best.decode.point.batch * short.best.decode.point.layout.tp <= plan.requests
    assert "both roles" in text_of(render(short))


def test_reasons_name_what_binds(large):
    lines = why(large)
    assert lines[0].startswith("prefill binds")
    assert any("TP16" in line for line in lines)
