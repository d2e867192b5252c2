"""`bench comm`, `experts` and `moe` over the kernels, in Triton's interpreter with real ranks; and
what becomes of measured times."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crossdock.bench import attention, child, comm_gpus, experts, moe, moe_rank
from crossdock.bench.comm_case import KNOWN, LINK, OTHER_FORMS, OURS, CommCase, draw
from crossdock.bench.comm_check import check_case
from crossdock.bench.comm_deepep import find_deep_ep
from crossdock.bench.comm_nvlink import NvlinkCase
from crossdock.bench.figures import DEEP_EP
from crossdock.bench.moe_parts import Span, parts_of
from crossdock.bench.rank_world import join
from crossdock.bench.ranks import Ranks, choose_ranks
from crossdock.comm import LocalLockstep, SharedMemory
from crossdock.core import ConfigError, CrossdockError

H200 = "2 x NVIDIA H200"
TWO, ONE = OTHER_FORMS
FULL = {"ranks": 2, "hidden": 7168, "experts": 256, "top_k": 8}


def test_busiest_link_counts_what_crosses():
    case = CommCase(2, 50, 128, 128, 8, 3)
    slots = [case.slots_of(rank, 7) for rank in range(2)]
    assert all(len(set(row)) == 3 for row in np.concatenate(slots))
    away = [(s // 4 != rank) for rank, s in enumerate(slots)]
    assert case.busiest_link(7, False) == max(a.any(1).sum() for a in away)
    assert case.busiest_link(7, True) == max(a.sum() for a in away)
    one = CommCase(4, 50, 128, 128, 16, 3, pattern="one-rank")
    assert all(one.slots_of(rank, 1).max() < 4 for rank in range(4))
    assert one.busiest_link(1, False) == 3 * 50


def timed(case, **graph_us):
    times = {
        (OURS, "dispatch_to_rows"): [180.0, 190.0, 200.0],
        (TWO, "dispatch_to_rows"): [210.0],
        (OURS, "combine"): [250.0],
        (ONE, "combine"): [270.0],
        (f"NCCL {KNOWN}", "dispatch"): [284.0],
        (f"NCCL {KNOWN}", "combine"): [300.0],
        (LINK, "copy"): [1000.0],
    }
    kinds = {key: {"eager": [2 * v for v in us], "graph": us} for key, us in times.items()}
    return comm_gpus.Timed(case, kinds, (4000, 4000), 14336, 528)


def test_comm_report():
    case = CommCase(2, 4096, 4096, 7168, 256, 8)
    options = comm_gpus.GpuCommOptions(2, "cuda")
    report = comm_gpus.report(comm_gpus.GpuCommRun(options, H200, "none", (timed(case),)), "cmd")
    document = json.loads(json.dumps(report.document()))
    found = {(c["name"], c["shape"]["variant"].split(", normal")[0]): c for c in document["cases"]}
    rows = found["dispatch_to_rows", OURS]
    assert (rows["median"], rows["target"], rows["reached"]) == (190.0, 200.0, True)
    assert rows["against"] == {TWO: 210.0, f"NCCL {KNOWN}": 284.0, DEEP_EP: 355.0}
    assert rows["wire_GBps"] == pytest.approx(4000 * 14336 / 190e-6 / 1e9)
    copy_rate = (256 << 20) / 1000e-6 / 1e9
    assert rows["share_of_copy"] == pytest.approx(rows["wire_GBps"] / copy_rate)
    assert (rows["eager_us"], rows["timed"], rows["programs"]) == (380.0, "graph", 528)
    combine = found["combine", OURS]
    assert combine["against"] == {ONE: 270.0, f"NCCL {KNOWN}": 300.0, DEEP_EP: 427.0}
    assert found["combine", f"NCCL {KNOWN}"]["target"] is None
    assert document["copy_GBps"] == pytest.approx(copy_rate)


def test_comm_targets_of_more_gpus():
    def targets(ranks, **change):
        case = CommCase(**{**FULL, "ranks": ranks, "tokens": 4096, "max_tokens": 4096, **change})
        options = comm_gpus.GpuCommOptions(ranks, "cuda")
        run = comm_gpus.GpuCommRun(options, f"{ranks} x NVIDIA H200", "none", (timed(case),))
        cases = [c for c in comm_gpus.report(run, "cmd").cases if c.target is not None]
        assert all(DEEP_EP not in c.against for c in cases)
        return {c.name: c.target for c in cases}

    assert targets(8) == {"combine": 850.0}
    assert targets(8, fp8=True) == {"dispatch_to_rows": 430.0}
    assert targets(8, tokens=128, max_tokens=128, fp8=True) == {"combine": 40.0}
    sent, home = 4000 * 14336 / 282e3, 4000 * 7168 * 2 / 282e3  # us at 282 GB/s
    assert targets(4) == pytest.approx({"dispatch_to_rows": sent, "combine": home})
    assert targets(4, fp8=True) == pytest.approx({"dispatch_to_rows": sent})
    assert not targets(4, tokens=128, max_tokens=128, fp8=True) and not targets(3)


@pytest.mark.parametrize(
    "change", [{"hidden": 4096}, {"per_expert": True}, {"pattern": "one-rank"}]
)
def test_no_figure_of_other_shapes(change):
    case = CommCase(**{**FULL, "tokens": 4096, "max_tokens": 4096, **change})
    options = comm_gpus.GpuCommOptions(2, "cuda")
    report = comm_gpus.report(comm_gpus.GpuCommRun(options, H200, "none", (timed(case),)), "cmd")
    assert all(c.target is None and DEEP_EP not in c.against for c in report.cases)


DEEP_EP_MODULE = """
__version__ = "0"


class Buffer:
    get_low_latency_rdma_size_hint = staticmethod(lambda tokens, hidden, ranks, experts: tokens)

    def __init__(self, group, num_rdma_bytes, low_latency_mode, num_qps_per_rank):
        assert (group.size(), num_rdma_bytes, num_qps_per_rank) == (2, 2, 2)

    def low_latency_dispatch(self, x, topk, most, experts, use_fp8):
        return x.new_zeros(2, 2 * most, x.shape[1]), None, (most, experts), None, None

    def low_latency_combine(self, y, topk, weights, handle):
        assert handle == (2, 4) and len(topk) == len(weights) == 2
"""


def test_comm_in_the_interpreter(tmp_path, monkeypatch):
    case = CommCase(2, 2, 2, 128, 4, 2)
    monkeypatch.setattr(comm_gpus, "cases_of", lambda options: [case])  # of many: they are slow
    (tmp_path / "deep_ep.py").write_text(DEEP_EP_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = {"hidden": 128, "experts": 4, "top_k": 2, "reps": 1, "turns": 2}
    options = comm_gpus.GpuCommOptions(2, "cpu", tokens=(2,), **sizes)
    report = comm_gpus.report(comm_gpus.run_comm(options), "cmd")
    by_who = {}
    for found in report.cases:
        by_who.setdefault(found.shape["variant"].split(", low")[0], []).append(found)
    ours = by_who[OURS]
    names = ["dispatch_to_rows", "dispatch_to_ready", "combine", "round_trip"]
    assert [c.name for c in ours] == names == [c.name for c in by_who[TWO]]
    assert all(c.n == 4 and c.median > 0 for c in ours)
    assert report.notes["interpreter"] and "interpreter" in report.device
    assert report.notes["deep_ep"] == "0"
    assert [c.name for c in by_who["DeepEP 0"]] == ["dispatch", "combine"]
    assert all("DeepEP 0, eager" in c.against for c in ours[:3])


def test_deep_ep_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    module, why = find_deep_ep(SimpleNamespace(lockstep=LocalLockstep()))
    assert module is None and "deep_ep" in why
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(__version__="1.2.1"))
    others = SimpleNamespace(exchange=lambda values: [tuple(values), (0,)])
    assert find_deep_ep(SimpleNamespace(lockstep=others))[0] is None  # another rank has it not


@pytest.fixture
def lone_rank(tmp_path):
    memory = SharedMemory.create(4 << 20)
    settings = {"rank": 0, "ranks": 1, "device": "cpu", "fd": memory.fd}
    yield join({**settings, "rendezvous": str(tmp_path / "store")})
    memory.close_fd()


WRONG = {
    "rows": lambda out: out.rows.view(torch.uint8)[1, 3].add_(1),
    "masked": lambda out: out.x.view(torch.uint8)[int(out.counts_S.argmax()), 0, 5].sub_(1),
    "home_of_rows": lambda out: out[1, 7].add_(0.5),
    "home_of_masked": lambda out: out[0, 7].add_(0.5),
    "grouped": lambda out: out[2][0].view(torch.uint8)[out[1].places_NK[0, 0], 2].add_(1),
    "home_of_segments": lambda out: out[1, 7].add_(0.5),
}


@pytest.mark.parametrize("method", [None, *WRONG])
def test_the_check_finds_what_is_wrong(lone_rank, monkeypatch, method):
    normal = method in ("grouped", "home_of_segments")
    case = CommCase(1, 3, 264 if normal else 3, 128, 4, 2, fp8=method == "rows")
    nvlink = NvlinkCase(case, lone_rank, draw(case, 0, 1, lone_rank.device))
    if method is None:
        return check_case(nvlink, lone_rank, 2)
    right = getattr(nvlink, method)

    def wrong(*args):
        out = right(*args)
        WRONG[method](out)
        return out

    monkeypatch.setattr(nvlink, method, wrong)
    with pytest.raises(CrossdockError, match="check against the collective transport"):
        check_case(nvlink, lone_rank, 2)


def test_parts_of_a_layer():
    once = ["_align", "router_gemm", "dispatch_fused", "hopper_kernel", "_swiglu_x"]
    once += ["hopper_kernel", "memset", "combine_fused", "flush"]
    names = [*once, *once, "_align"]
    spans = [Span(name, 10.0 * i, 10.0 * i + 6.0 + i % 9) for i, name in enumerate(names)]
    spans[4] = Span(names[4], 40.0, 49.0)
    got = parts_of(spans)
    lengths = [span.end - span.start for span in spans]
    means = [(lengths[i] + lengths[i + 9]) / 2 for i in range(9)]
    parts = got["parts"]
    assert parts["router"] == means[1] and parts["other"] == means[6]
    assert (parts["gemm 1"], parts["gemm 2"]) == (means[3], means[5])
    assert got["kernels"]["hopper_kernel"] == means[3] + means[5]
    assert "flush" not in got["kernels"] and parts_of(spans[:3]) == {}


def test_experts_in_the_interpreter():
    shapes = experts.parse_shapes("grouped:2x3,masked:2x3")
    # One turn: the median of several rates is not that of their times.
    options = experts.ExpertsOptions(1, "cpu", shapes, width=256, out=128, reps=1, turns=1)
    report = experts.report(experts.run_experts(options), "cmd")
    ours = [c for c in report.cases if c.shape["variant"].startswith(experts.OURS)]
    assert [(c.name, c.unit) for c in ours] == [("arithmetic", "TFLOP/s"), ("weights", "TB/s")] * 2
    grouped = ours[0]
    flops = 2 * 2 * 3 * 256 * 128
    assert grouped.median == pytest.approx(flops / grouped.more["us"] / 1e6)
    assert "BF16, torch._grouped_mm" in grouped.against


def test_shapes_of_experts():
    assert experts.parse_shapes("masked:8x16") == (experts.Shape("masked", 8, 16),)
    for text in ("", "masked", "masked:8", "rows:8x1", "masked:0x1", "masked:8x1,"):
        with pytest.raises(ConfigError, match="--shapes"):
            experts.parse_shapes(text)


TINY = "decode:gqa-4/2:3x40,decode:mla-2:2x20,prompt:gqa-4/2:2x20,prompt:mla-2:2x20"


def test_attention_in_the_interpreter():
    options = attention.AttentionOptions("cpu", attention.parse_shapes(TINY), reps=1, turns=1)
    run = attention.run_attention(options)
    cases = attention.report(run, "cmd").cases
    found = {(c.name, c.shape["variant"]): c for c in cases}
    ours = found["arithmetic", "Triton, decode:gqa-4/2:3x40"]
    assert ours.median == pytest.approx(4 * 128 * 4 * 3 * 40 / ours.more["us"] / 1e6)
    read = found["kv_read", f"{attention.FP8}, decode:mla-2:2x20"]
    fp8 = found["arithmetic", f"{attention.FP8}, decode:mla-2:2x20"]
    assert read.median == pytest.approx(2 * 20 * (576 + 8) / fp8.more["us"] / 1e6)
    errors = {v: c.median for (name, v), c in found.items() if name == "error"}
    assert len(errors) == 7 and max(e for v, e in errors.items() if "FP8" not in v) < 5e-3
    assert all(0.01 < e < 0.05 for v, e in errors.items() if "FP8" in v)
    assert not [c for c in cases if c.target is not None]
    refused = attention.report(run, "cmd").notes["refused"]
    assert "need a GPU" in refused["decode:mla-2:2x20"]["FlashInfer"]
    assert "Triton" in refused["prompt:mla-2:2x20"]["FlashInfer"]


@pytest.mark.parametrize("shape", ["prompt:mla-2:2x20", "prompt:gqa-2/1:2x20"])
def test_prompts_may_have_more_keys_than_layers_copy_at_once(shape, monkeypatch):
    from crossdock.bench import attention_case, attention_rank
    from crossdock.layers.attention import paged_plan

    monkeypatch.setattr(paged_plan, "COPIED_KEYS", 30)
    given = attention_case.draw(attention.parse_shapes(shape)[0], 16, torch.device("cpu"))
    wanted = attention_case.reference(given)
    cases = [given] if "mla" in shape else [given, attention_case.quantised(given)]
    for case in cases:
        got = attention_rank._on_triton(case)[0]()
        most = attention_rank.MOST_ERROR[attention.FP8 if case.scales else "Triton"]
        assert float((got.float() - wanted).norm() / wanted.norm()) < most


def test_figures_asked_of_attention():
    many, few = attention.parse_shapes("decode:mla-128:128x4096,decode:gqa-32/4:128x4096")
    us = {"Triton": [500.0], "FlashInfer": [280.0], attention.FP8: [400.0], attention.COPY: [500.0]}
    times = {who: {"eager": [2 * v for v in values], "graph": values} for who, values in us.items()}
    errors = dict.fromkeys(us, 1e-3)
    measured = attention.Measured(times, errors, errors, {})
    options = attention.AttentionOptions("cuda", (many, few))
    run = attention.AttentionRun(options, "NVIDIA H200", 2 << 30, {many: measured, few: measured})
    cases = attention.report(run, "cmd").cases
    found = {(c.name, c.shape["variant"]): c for c in cases}
    theirs = found["arithmetic", f"FlashInfer, {many}"]
    assert theirs.median == pytest.approx(2 * 1088 * 128 * 128 * 4096 / 280e-6 / 1e12)
    assert (theirs.target, theirs.reached) == (474.0, True)
    assert theirs.against["Triton"] == pytest.approx(2 * 1088 * 128 * 128 * 4096 / 500e-6 / 1e12)
    assert found["arithmetic", f"Triton, {many}"].reached is False
    share = found["kv_read_share", f"Triton, {few}"]
    assert share.median == pytest.approx(100 * (128 * 4096 * 2048 / 500) / (2**31 / 500))
    assert (share.target, share.reached) == (70.0, False)
    assert found["kv_read_share", f"Triton, {many}"].target is None
    assert found["kv_read_share", f"{attention.FP8}, {few}"].target is None


@pytest.mark.parametrize(
    "text",
    ["", "decode", "decode:gqa-4:1x1", "decode:mla-4/2:1x1", "decode:gqa-4/3:1x1",
     "both:mla-4:1x1", "decode:mha-4/4:1x1", "prompt:mla-4:0x1", "prompt:mla-4:1x1,"],
)  # fmt: skip
def test_shapes_of_attention_that_are_none(text):
    with pytest.raises(ConfigError, match="--shapes"):
        attention.parse_shapes(text)


def test_moe_report():
    parts = {
        "router": 100.0, "dispatch": 130.0, "place and gather": 150.0, "gemm 1": 1700.0,
        "swiglu and quantise": 100.0, "gemm 2": 800.0, "combine": 270.0, "other": 5.0,
        "between kernels": 10.0,
    }  # fmt: skip
    times = {"triton": {"eager": [3300.0], "graph": [3200.0, 3300.0]}, "copy": {"graph": [700.0]}}
    rows_RR = np.array([[4000, 4096], [4090, 4010]])
    layer = moe.Layer(
        4096, True, times, {"triton": [parts] * 2}, {}, [32000, 33000], rows_RR, 10**9
    )
    run = moe.MoERun(moe.MoEOptions(2, "cuda"), H200, (layer,))
    cases = {case.name: case for case in moe.report(run, "cmd").cases}
    shown = cases["moe_layer"].more["parts_ms"]
    assert shown == pytest.approx({part: us / 1e3 for part, us in parts.items()})
    rest = cases["neither_gemm_nor_wire"]
    assert rest.median == pytest.approx(100 * (1 - 2900 / 3250))
    assert rest.target == 15.0 and rest.reached is True
    strict = cases["neither_gemm_nor_wire_at_copy_speed"]
    wire = 4096 * (7168 + 224 + 14336) / (256 << 20) * 700
    assert strict.median == pytest.approx(100 * (1 - (2500 + wire) / 3250))
    reading = cases["over_reading_weights"]
    assert reading.median == pytest.approx(3250 / (1e9 / 4.3e12 * 1e6)) and reading.target is None


def test_moe_in_the_interpreter():
    spec = moe.V3
    small = {**asdict(spec), "num_experts": 16, "intermediate_size": 128, "top_k": 4}
    options = moe.MoEOptions(2, "cpu", (2,), 128, type(spec)(**small), reps=1, turns=1)
    run = moe.run_moe(options)
    assert {(layer.tokens, layer.fp8) for layer in run.layers} == {(2, True), (2, False)}
    assert all(sum(layer.rows) == 2 * 2 * 4 for layer in run.layers)
    assert all((layer.rows_RR.sum(1) >= 2).all() for layer in run.layers)


def test_a_measured_layer_has_the_engines_workspace(monkeypatch):
    monkeypatch.setattr(moe_rank, "expert_workspace", lambda config, device: 12345)
    world = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"))
    assert moe_rank._context(world, moe.V3, None, "bf16").workspace == 12345


def test_of_ranks_that_fail_the_first_is_told(monkeypatch, tmp_path):
    (tmp_path / "stand_in_rank.py").write_text(
        "import json, sys, threading\n"
        "if json.loads(sys.stdin.readline())['rank'] == 0: threading.Event().wait()\n"
        "print(json.dumps({'error': 'out of memory', 'user': False}), flush=True)\n"
        "threading.Event().wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(child, "ANSWER_S", 30.0)
    with ExitStack() as stack, pytest.raises(CrossdockError, match=r"^out of memory$"):
        Ranks("stand_in_rank", 2, "cpu", {}, stack)


def test_sizes_are_checked():
    sizes = {"tokens": (2,), "experts": 4, "top_k": 2}
    for wrong in ({"hidden": 100}, {"top_k": 5}, {"pattern": "two-ranks"}):
        options = comm_gpus.GpuCommOptions(2, "cpu", **{"hidden": 128, **sizes, **wrong})
        with pytest.raises(ConfigError, match="expected"):
            comm_gpus.run_comm(options)


def test_ranks_are_chosen_from_devices():
    assert choose_ranks(3, "cpu", on_cpu=4) == (3, "cpu")
    assert choose_ranks(None, "cpu", on_cpu=4) == (4, "cpu")
    with pytest.raises(ConfigError, match="--device"):
        choose_ranks(1, "tpu", on_cpu=4)
    assert choose_ranks(None, "cpu", on_cpu=2, interpreted=True) == (2, "cpu")


def test_the_interpreter_runs_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("crossdock.bench.ranks.visible_gpus", lambda: 0)
    for device in (None, "auto"):
        with pytest.raises(ConfigError, match="--device cpu"):
            choose_ranks(None, device, on_cpu=2, interpreted=True)
