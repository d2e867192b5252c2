"""The parts of a weight that the ranks of an attention group hold."""

from dataclasses import replace

import pytest
import torch

from crossdock.core import GQASpec, ModelSpec, MoESpec, RopeSpec
from crossdock.layers import SoloGroup, choose_attention, choose_products
from crossdock.layers.fp8 import Fp8Weight
from crossdock.models.dummy import DummyWeights
from crossdock.models.fp8 import Part, fp8_matrix
from crossdock.models.weights import Loader, load_gqa, load_mlp

CPU = torch.device("cpu")
SPEC = ModelSpec(
    "Qwen3MoeForCausalLM", 1, 64, 96, 50, GQASpec(8, 4, 16, "head", bias=True, output_bias=True),
    RopeSpec(16, 1e4), MoESpec(4, 2, 32), (), 1e-6, 100, mlp_bias=True,
)  # fmt: skip


class Part4:
    """The third of four ranks, of which nothing is exchanged."""

    size, rank = 4, 2


def loader(group) -> Loader:
    source = DummyWeights(torch.float32, CPU, 1)
    # Biases of dummies are zero; ours tell rows apart.
    whole = source.get
    source.get = lambda name, shape, fp32=False: (  # type: ignore[method-assign]
        torch.arange(shape[0]).float() if "bias" in name else whole(name, shape, fp32)
    )
    attention = choose_attention("torch", CPU, torch.float32, False)
    products = replace(choose_products(False), pack=lambda w: w)
    return Loader(SPEC, source, products, group, torch.float32, CPU, attention)


def test_heads_of_attention() -> None:
    whole, part = (load_gqa(loader(g), "a") for g in (SoloGroup(), Part4()))
    q, k, v = whole.w.qkv.split((128, 64, 64))
    assert torch.equal(part.w.qkv, torch.cat((q[64:96], k[32:48], v[32:48])))
    assert torch.equal(part.w.out, whole.w.out[:, 64:96]) and part.w.out.is_contiguous()
    assert part.w.qkv_bias.tolist() == [*range(64, 96), *range(32, 48), *range(32, 48)]
    assert (part.w.out_bias, len(whole.w.out_bias)) == (None, 64)  # rank 0 adds it
    assert (part.spec.num_heads, part.spec.num_kv_heads) == (2, 1)


def test_width_of_dense_layers_and_bytes_held() -> None:
    whole, part = loader(SoloGroup()), loader(Part4())
    a, b = (load_mlp(load, "m", 96) for load in (whole, part))
    gate, up = a.gate_up_FH.split(96)
    assert torch.equal(b.gate_up_FH, torch.cat((gate[48:72], up[48:72])))
    assert torch.equal(b.down_HF, a.down_HF[:, 48:72])
    assert b.gate_up_bias.tolist() == [*range(48, 72)] * 2 and b.down_bias is None
    assert whole.held.nbytes == 4 * (3 * 96 * 64 + 2 * 96 + 64)
    assert part.held.nbytes == 4 * (3 * 24 * 64 + 2 * 24)


def test_fp8_between_blocks() -> None:
    source = DummyWeights(torch.bfloat16, CPU, 1)
    get = source.get_fp8

    def told_apart(name, shape, index=None, order=None):
        codes, scales = get(name, shape, index, order)
        return codes, torch.arange(scales.numel()).view(scales.shape).float()

    source.get_fp8 = told_apart  # type: ignore[method-assign]
    names = ("gate", "up")
    whole = fp8_matrix(source, [Part(n, 512) for n in names], 320)
    part = fp8_matrix(source, [Part(n, 512, own=slice(128, 256)) for n in names], 320)
    assert isinstance(whole, Fp8Weight) and isinstance(part, Fp8Weight)
    bytes_, cut = (w.codes.view(torch.uint8) for w in (whole, part))
    assert torch.equal(cut, torch.cat((bytes_[128:256], bytes_[640:768])))
    assert part.scales.tolist() == [[3, 4, 5]] * 2 and part.spans == ((0, 256),)
    down, half = (
        fp8_matrix(source, [Part("down", 200)], 512, columns)
        for columns in (slice(None), slice(256, 512))
    )
    assert torch.equal(half.codes.view(torch.uint8), down.codes.view(torch.uint8)[:, 256:])
    assert half.scales.tolist() == [[2, 3], [6, 7]]
    with pytest.raises(ValueError, match="64 lies within a block of 128"):
        fp8_matrix(source, [Part("gate", 512, own=slice(64, 128))], 320)
