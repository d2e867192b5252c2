"""Invariant mode: a token's logits are the same bits whatever ran beside it and however it came."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from crossdock.core import GQASpec, MLASpec, ModelSpec, MoESpec, RopeSpec
from crossdock.layers import choose_products
from crossdock.layers.attention.backend import invariant_attention
from crossdock.models import base

MOE = MoESpec(8, 3, 24, norm_topk_prob=True)
SIGMOID = MoESpec(
    10, 3, 20, "sigmoid", 5, 2, "top2", True, True, routed_scaling_factor=2.5,
    shared_intermediate_size=24,
)  # fmt: skip
MLA = MLASpec(4, 20, 24, 16, 8, 12)
SPECS = {
    "mla": ModelSpec(
        "DeepseekV3ForCausalLM", 3, 48, 60, 101, MLA, RopeSpec(8, 1e4, True), SIGMOID, (1, 2),
        1e-6, 512,
    ),
    "mla-no-q-lora": ModelSpec(
        "DeepseekV2ForCausalLM", 2, 40, 52, 64, MLASpec(3, None, 16, 8, 8, 8),
        RopeSpec(8, 1e4, True), MOE, (1,), 1e-6, 512,
    ),
    "mla-odd-widths": ModelSpec(
        "DeepseekV3ForCausalLM", 2, 45, 37, 51, MLASpec(3, 13, 19, 9, 6, 11),
        RopeSpec(6, 1e4, True), SIGMOID, (1,), 1e-6, 512,
    ),
    "gqa": ModelSpec(
        "Qwen3MoeForCausalLM", 3, 48, 60, 101, GQASpec(6, 2, 16, "head"), RopeSpec(16, 1e4), MOE,
        (0, 2), 1e-6, 512,
    ),
    "mha-window": ModelSpec(
        "MixtralForCausalLM", 2, 48, 60, 64, GQASpec(4, 4, 12, sliding_window=140),
        RopeSpec(12, 1e4), MOE, (0, 1), 1e-6, 512,
    ),
}  # fmt: skip


class RandomWeights:
    """Any tensor that is asked for, the same for the same name."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu"):
        self.dtype, self.device = dtype, device

    def has(self, name: str) -> bool:
        return "gate_up_proj" not in name

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(
            sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**60
        )
        tensor = torch.randn(shape, generator=generator)
        tensor = 1 + 0.2 * tensor if len(shape) == 1 else tensor * 1.5 * shape[-1] ** -0.5
        return tensor.to(self.device, torch.float32 if fp32 else self.dtype)

    def get_slice(
        self, name: str, index: int, shape: tuple[int, ...], fp32: bool = False
    ) -> Tensor:
        raise AssertionError(name)


def prompt(length: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_the_same_bits(name: str, dtype: torch.dtype, device: str, session) -> None:
    spec, source = SPECS[name], RandomWeights(dtype, device)
    make = lambda **options: session(  # noqa: E731
        spec, source, invariant=True, dtype=dtype, device=device, **options
    )
    tokens = prompt(161, 1, spec.vocab_size)  # more than one key block
    others = {f"o{i}": prompt(n, 10 + i, spec.vocab_size) for i, n in enumerate((1, 2, 37, 130))}
    want = make().step({"x": tokens})["x"]
    assert want.isfinite().all() and want.std() > 0.1

    def collect(ours, cuts: list[int], beside: list[dict[str, list[int]]]) -> Tensor:
        rows = []
        for i, (a, b) in enumerate(pairwise(cuts)):
            work = beside[i] if i < len(beside) else {}
            rows.append(ours.step({**work, "x": tokens[a:b]})["x"])
        return torch.cat(rows)

    chunks = [0, 7, 8, 64, 127, 130, 161]
    assert torch.equal(collect(make(), chunks, []), want), "chunked"
    assert torch.equal(collect(make(page_size=16), chunks, []), want), "page size"
    beside = [others, {k: v[:1] for k, v in others.items()}, {"o2": others["o2"]}]
    mixed = make()
    assert torch.equal(collect(mixed, chunks, beside), want), "mixed"
    one_by_one = [0, 100, *range(101, 162)]
    assert torch.equal(collect(make(), one_by_one, [others, *beside]), want), "decoded"
    prefix = make()
    prefix.step({"x": tokens[:96]})
    prefix.pages["y"], prefix.done["y"] = prefix.pages["x"][:24], 96
    assert torch.equal(prefix.step({"y": tokens[96:]})["y"], want[96:]), "cached prefix"


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_an_fp8_cache_keeps_it(name: str, session) -> None:
    """Codes and scales of a row are its own; what they cost, in logits."""
    spec = SPECS[name]
    make = lambda **options: session(  # noqa: E731
        spec, RandomWeights(torch.float32), invariant=True, **options
    )
    small = lambda: make(kv_dtype=torch.float8_e4m3fn)  # noqa: E731
    tokens = prompt(150, 3, spec.vocab_size)
    exact, want = make().step({"x": tokens})["x"], small().step({"x": tokens})["x"]
    mixed, rows = small(), []
    for a, b in pairwise([0, 70, 71, 150]):
        rows.append(mixed.step({f"o{a}": tokens[b:][:5] or [1], "x": tokens[a:b]})["x"])
    assert torch.equal(torch.cat(rows), want)
    error_T = (want - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0.001 < error_T.median() < 0.15  # some tokens go to other experts


@pytest.mark.parametrize("name", SPECS)
def test_close_to_ordinary_mode(name: str, session) -> None:
    spec, source = SPECS[name], RandomWeights(torch.float32)
    tokens = prompt(150, 2, spec.vocab_size)
    invariant, ordinary = (
        session(spec, source, invariant=mode).step({"x": tokens})["x"] for mode in (True, False)
    )
    assert (invariant - ordinary).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "fp8"), [("mla", False), ("mla", True), ("gqa", False)])
def test_what_gpus_run_is_close_to_torch(name: str, fp8: bool, session, monkeypatch) -> None:
    """Their products and attention, in Triton's interpreter where there is none."""
    spec, source = SPECS[name], RandomWeights(torch.float32)
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    tokens = {"x": prompt(35, 4, spec.vocab_size), "y": prompt(1, 5, spec.vocab_size)}
    want = session(spec, source, invariant=True, kv_dtype=kv_dtype).step(tokens)
    products = choose_products(True, torch.device("cuda"))
    monkeypatch.setattr(base, "choose_products", lambda *_: products)
    monkeypatch.setattr(base, "choose_attention", lambda *_: invariant_attention(torch.float32))
    ours = session(spec, source, invariant=True, kv_dtype=kv_dtype)
    assert ours.model.attention.name == "invariant"
    got = ours.step({"x": tokens["x"][:20]})["x"]
    rest = ours.step({"x": tokens["x"][20:], "y": tokens["y"]})
    assert (torch.cat((got, rest["x"])) - want["x"]).abs().max() < 1e-4
    assert (rest["y"] - want["y"]).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_gpus_agree_with_cpus(name: str, session) -> None:
    spec, tokens = SPECS[name], prompt(150, 2, SPECS[name].vocab_size)
    cpu, cuda = (
        session(spec, RandomWeights(torch.float32, device), invariant=True, device=device).step(
            {"x": tokens}
        )["x"]
        for device in ("cpu", "cuda")
    )
    assert (cpu - cuda).abs().max() < 1e-4
