"""Whether FlashInfer is taken, and what is said where it is not."""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from crossdock.core import ConfigError, GQASpec, MLASpec
from crossdock.layers.attention import AttentionCase, choose_attention
from crossdock.layers.attention import flashinfer_library as library

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
GQA = AttentionCase(GQASpec(32, 4, 128), 128**-0.5, False)
MLA = AttentionCase(MLASpec(128, 1536, 512, 128, 64, 128), 192**-0.5, False)


@pytest.fixture
def hopper(monkeypatch):
    """As on a Hopper GPU with FlashInfer; what it holds can be changed."""
    machine = {"capability": (9, 0), "version": "0.6.6", "compiles": lambda spec, dtype: None}
    monkeypatch.setattr(library, "version", lambda name: machine["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    monkeypatch.setattr(library, "_compile", lambda *args: machine["compiles"](*args))
    loaded = SimpleNamespace(__version__="0.6.6")
    monkeypatch.setattr("crossdock.layers.attention.backend.load_flashinfer", lambda: loaded)
    return machine


@pytest.mark.parametrize("case", [GQA, MLA])
@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_it_is_taken_where_it_can_run(hopper, name, case):
    chosen = choose_attention(name, CUDA, BF16, False, case)
    assert chosen.name == "flashinfer"
    assert chosen.reason.startswith(f"0.6.6, {'prompts' if case is GQA else 'decodes'} of whole")


def no_compiler(spec, dtype):
    raise RuntimeError("Ninja build failed\nwith much to read")


@pytest.mark.parametrize(
    ("case", "machine", "said"),
    [
        (GQA, {"capability": (8, 0)}, "cannot run on this GPU"),
        (GQA, {"version": "0.7.4"}, "0.7.4 is installed, not 0.6.*"),
        (GQA, {"compiles": no_compiler}, "imported or compiled: Ninja build failed$"),
        (replace(GQA, fp8_cache=True), {}, "FP8 cache"),
        (replace(GQA, spec=GQASpec(32, 4, 128, sliding_window=9)), {}, "sliding windows"),
        (replace(GQA, spec=GQASpec(32, 4, 80)), {}, "no heads of 80, only 64, 128 and 256"),
        (replace(MLA, spec=replace(MLA.spec, kv_lora_rank=256)), {}, "no MLA of 256 [+] 64"),
    ],
)
def test_where_it_cannot_run_auto_says_why_and_its_name_is_refused(hopper, case, machine, said):
    hopper.update(machine)
    with pytest.raises(ConfigError, match=f"cannot run: .*{said.removesuffix('$')}.*; use"):
        choose_attention("flashinfer", CUDA, BF16, False, case)
    chosen = choose_attention("auto", CUDA, BF16, False, case)
    assert chosen.name == "triton" and re.search(f"FlashInfer: .*{said}", chosen.reason)


@pytest.mark.parametrize("case", [GQA, MLA])
def test_missing_it_leaves_triton(monkeypatch, case):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    with pytest.raises(ConfigError, match="not installed"):
        choose_attention("flashinfer", CUDA, BF16, False, case)
    chosen = choose_attention("auto", CUDA, BF16, False, case)
    assert chosen.name == "triton" and 'pip install "crossdock[flashinfer]"' in chosen.reason


def test_few_heads_are_left_to_triton_unless_it_is_named(hopper):
    few, compiled = replace(MLA, spec=replace(MLA.spec, num_heads=16)), []
    hopper["compiles"] = lambda spec, dtype: compiled.append(spec)
    chosen = choose_attention("auto", CUDA, BF16, False, few)
    assert chosen.name == "triton" and "from 64 heads of a rank on, not 16" in chosen.reason
    assert not compiled  # which would take minutes
    assert choose_attention("flashinfer", CUDA, BF16, False, few).name == "flashinfer"


@pytest.mark.parametrize(
    ("device", "dtype", "invariant", "said"),
    [
        (torch.device("cpu"), BF16, False, "need a GPU, not cpu"),
        (CUDA, torch.float32, False, "16 bits"),
        (CUDA, BF16, True, "invariant mode"),
    ],
)
def test_it_is_refused_where_no_kernel_runs(hopper, device, dtype, invariant, said):
    with pytest.raises(ConfigError, match=f'"flashinfer" cannot run: .*{said}'):
        choose_attention("flashinfer", device, dtype, invariant, GQA)
    assert choose_attention("auto", device, dtype, invariant, GQA).name in ("torch", "invariant")
