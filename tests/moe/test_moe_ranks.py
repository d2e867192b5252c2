"""A whole layer over rank processes: against a dense reference, and invariant to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from crossdock.comm import SharedMemory, shm_bytes

SCRIPT = Path(__file__).with_name("moe_rank.py")
TOKENS, HIDDEN, WIDTH = 23, 36, 12


def make_case(seed, experts, top_k, hidden=HIDDEN, width=WIDTH, **settings):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return {
        "x": normal(TOKENS, hidden),
        "keys": rng.integers(-(2**62), 2**62, TOKENS),
        "router": normal(experts, hidden, scale=(36 / hidden) ** 0.5),
        "bias": normal(experts, scale=0.3),
        "gate_up": normal(experts, 2 * width, hidden, scale=1.2 / hidden**0.5),
        "down": normal(experts, hidden, width, scale=1 / width**0.5),
        "experts": experts,
        "top_k": top_k,
        "dtype": "float32",
        "invariant": False,
        "on_device": False,
        "fp8": False,
        "max_tokens": TOKENS,
        "most": 0,
        "overlap": "sbo",
        "workspace": 1 << 20,
        **settings,
    }


def over(case, size, slots, seed):
    """The case on `size` ranks of `slots` slots: what is left over are replicas and empty slots."""
    rng, experts = np.random.default_rng(seed), int(case["experts"])
    rows = []
    for _ in range(2):
        rest = rng.integers(-1, experts, size * slots - experts)
        rows.append(rng.permutation(np.concatenate([np.arange(experts), rest])))
    owner = rng.integers(0, max(1, size - 1), TOKENS)  # the last of several ranks has no token
    return {**case, "placement": np.array(rows), "owner": owner}


def gather(results):
    out = np.full((TOKENS, results[0]["out"].shape[1]), np.nan, np.float32)
    for result in results:
        out[result["mine"]] = result["out"]
    return out


def dense(case):
    x, router = case["x"].astype(np.float64), case["router"].astype(np.float64)
    scores = 1 / (1 + np.exp(-x @ router.T))
    chosen = np.argsort(-(scores + case["bias"]), axis=1)[:, : int(case["top_k"])]
    out = 0.5 * x
    for t, ids in enumerate(chosen):
        weights = scores[t, ids] / scores[t, ids].sum() * 1.5
        for e, weight in zip(ids, weights, strict=True):
            gate, up = np.split(case["gate_up"][e] @ x[t], 2)
            out[t] += weight * (case["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out, np.bincount(chosen.ravel(), minlength=int(case["experts"]))


def make_cases():
    """name: (ranks, transport, case)."""
    cases = {}
    for size, slots, kind in ((1, 6, "local"), (2, 4, "shm"), (4, 2, "shm"), (3, 3, "collective")):
        base = make_case(size, experts=6, top_k=3)
        cases[f"{size} {kind}"] = (size, kind, over(base, size, slots, seed=size))
    base = make_case(7, experts=6, top_k=3, max_tokens=4)
    cases["2 shm in pieces"] = (2, "shm", over(base, 2, 4, seed=2))
    for overlap in ("off", "tbo"):
        for name in ("1 local", "2 shm", "4 shm", "3 collective", "2 shm in pieces"):
            size, kind, case = cases[name]
            cases[f"{name} {overlap}"] = (size, kind, {**case, "overlap": overlap})
    layouts = (
        (1, 4, "local", "off"), (2, 3, "shm", "sbo"), (5, 1, "shm", "off"),
        (3, 2, "collective", "sbo"), (2, 3, "shm", "tbo"), (4, 1, "shm", "tbo"),
        (3, 2, "collective", "tbo"),
    )  # fmt: skip
    for dtype in DTYPES:
        base = make_case(11, experts=4, top_k=2, invariant=True, dtype=dtype)
        for size, slots, kind, overlap in layouts:
            case = {**over(base, size, slots, seed=size), "overlap": overlap}
            cases[f"invariant {dtype} {size} {kind} {overlap}"] = (size, kind, case)
    interpreted = (
        "bf16 masked in pieces", "bf16 waves", "fp8 masked", "fp8 grouped", "bf16 masked tbo"
    )  # fmt: skip
    on_device = device_cases(2)
    return {
        **cases,
        **{name: on_device[name] for name in (f"device {way} 2" for way in interpreted)},
    }


def device_cases(size):
    """Rows that the host never counts: masked, in pieces, in segments, in segments by waves, of two
    batches in flight. `most`
    claims more tokens than there are, which low latency does not take."""
    ways = {
        "masked": {},
        "masked in pieces": {"max_tokens": 8},
        "grouped": {"max_tokens": 300, "most": 257, "workspace": 1 << 30},
        "waves": {"max_tokens": 300, "most": 257},
        "masked tbo": {"overlap": "tbo"},
        "grouped tbo": {"max_tokens": 300, "most": 257, "workspace": 1 << 30, "overlap": "tbo"},
    }
    shape = {"hidden": 256, "width": 128, "dtype": "bfloat16", "on_device": True}
    cases = {}
    for name, way in ways.items():
        for dtype in ("bf16", "fp8"):
            case = make_case(size, experts=6, top_k=3, fp8=dtype == "fp8", **shape, **way)
            case = over(case, size, 4 if size > 1 else 6, seed=size)
            cases[f"device {dtype} {name} {size}"] = (size, "nvlink", case)
    return cases


DTYPES = ("float32", "bfloat16")
CASES = make_cases()


def environment(device):
    """The kernels of the nvlink transport run on CPUs in Triton's interpreter alone."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    if device == "cuda":
        del env["TRITON_INTERPRET"]
    return env


def run(root, cases, device):
    """Of every case, by name: (case, what each of its ranks wrote). Starting processes is what
    costs, so one set of them runs all cases."""
    texts, memories = [], []
    for name, (size, kind, case) in cases.items():
        (root / name).mkdir()
        np.savez(root / name / "case.npz", **case)
        fd = -1
        if kind == "shm":
            invariant = bool(case["invariant"])
            needed = shm_bytes(size, TOKENS, HIDDEN, int(case["top_k"]), 4, invariant)
            memories.append(SharedMemory.create(needed))
            fd = memories[-1].fd
        elif kind == "nvlink" and device == "cpu":
            memories.append(SharedMemory.create(16 << 20))
            fd = memories[-1].fd
        texts.append(f"{size}:{kind}:{fd}:{root / name}")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), device, *texts],
            pass_fds=[memory.fd for memory in memories],
            env=environment(device),
        )
        for rank in range(max(size for size, _, _ in cases.values()))
    ]
    try:
        assert [process.wait(280) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for memory in memories:
            memory.close_fd()
    return {
        name: (case, [dict(np.load(root / name / f"out{rank}.npz")) for rank in range(size)])
        for name, (size, _, case) in cases.items()
    }


def check(case, got, expected):
    if str(case["dtype"]) == "float32":
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        return
    error = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < (0.1 if case["fp8"] else 0.02)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks"), CASES, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_on_cuda(tmp_path, dtype):
    cases = {}
    for size in range(1, min(2, torch.cuda.device_count()) + 1):
        case = over(make_case(size, experts=6, top_k=3, dtype=dtype), size, 6, seed=size)
        cases[str(size)] = (size, "auto", case)
        if dtype == "bfloat16":
            cases.update(device_cases(size))
    for case, ranks in run(tmp_path, cases, "cuda").values():
        check(case, gather(ranks), dense(case)[0])


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("invariant")])
def test_a_layer_equals_the_dense_reference(results, name):
    case, ranks = results[name]
    expected, tokens_E = dense(case)
    check(case, gather(ranks), expected)
    np.testing.assert_array_equal(sum(r["tokens_E"] for r in ranks), tokens_E)
    rows_P = np.concatenate([r["rows_S"] for r in ranks])
    placed = case["placement"][1]
    assert not rows_P[placed < 0].any()
    served = [rows_P[placed == e].sum() for e in range(6)]
    np.testing.assert_array_equal(served, tokens_E)


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_bits_do_not_depend_on_ranks_or_placement(results, dtype):
    names = [name for name in CASES if name.startswith(f"invariant {dtype}")]
    case, alone = results[names[0]]
    expected, _ = dense(case)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(gather(alone), expected, rtol=tolerance, atol=tolerance)
    for name in names[1:]:
        np.testing.assert_array_equal(gather(results[name][1]), gather(alone), name)
