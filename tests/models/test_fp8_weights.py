"""FP8 weights of checkpoints: codes as they are stored, others quantised, experts by slot."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from crossdock.core import QuantSpec
from crossdock.kernels.quant import dequantise_weights
from crossdock.models.checkpoint import Checkpoint, dequantise
from crossdock.models.dummy import DummyWeights
from crossdock.models.fp8 import Part, fp8_experts, fp8_matrix

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


def stored(rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = (torch.randn(rows, width) * 100).clamp(-448, 448).to(FP8)
    return codes, torch.rand(-(-rows // 128), -(-width // 128)) + 0.5


def write(path: Path, tensors: dict[str, Tensor | tuple[Tensor, Tensor]]) -> None:
    flat: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat |= (
            {name: tensor} if isinstance(tensor, Tensor)
            else {name: tensor[0], f"{name}_scale_inv": tensor[1]}
        )  # fmt: skip
    save_file(flat, path / "model.safetensors")


def open_checkpoint(path: Path, quantised: bool = True) -> Checkpoint:
    return Checkpoint(path, QuantSpec() if quantised else None, torch.bfloat16, CPU)


def value(codes: Tensor, scales: Tensor) -> Tensor:
    return dequantise(codes, scales, (128, 128))


def test_stored_codes_stay_and_their_width_is_padded(tmp_path) -> None:
    codes, scales = stored(200, 320)
    write(tmp_path, {"w": (codes, scales)})
    with open_checkpoint(tmp_path) as checkpoint:
        got, got_scales = checkpoint.get_fp8("w", (200, 320))
        read = checkpoint.bytes_read
    assert got.shape == (200, 384) and (got[:, 320:].float() == 0).all()
    assert torch.equal(got[:, :320].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(got_scales, scales) and read == codes.nbytes + scales.nbytes


def test_rows_in_another_order(tmp_path) -> None:
    """Within a block the codes move; across blocks the values are quantised anew."""
    codes, scales = stored(256, 128)
    write(tmp_path, {"w": (codes, scales)})
    whole = value(codes, scales)
    within = torch.cat((torch.randperm(128), torch.randperm(128) + 128))
    across = torch.randperm(256)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(value(*checkpoint.get_fp8("w", (256, 128), order=within)), whole[within])
        anew = value(*checkpoint.get_fp8("w", (256, 128), order=across))
    error = (anew - whole[across]).abs()
    assert error.max() > 0 and (error <= whole[across].abs() / 12 + 0.5).all()


def test_what_a_quantised_checkpoint_keeps_is_kept(tmp_path) -> None:
    plain = torch.randn(128, 256).bfloat16()
    write(tmp_path, {"a": stored(256, 256), "b": stored(64, 256), "c": plain})
    with open_checkpoint(tmp_path) as checkpoint:
        joined = fp8_matrix(checkpoint, [Part("a", 256), Part("b", 64)], 256)
        assert joined is not None and joined.codes.shape == (320, 256)
        assert joined.spans == ((0, 320),) and joined.scales.shape == (3, 2)
        assert fp8_matrix(checkpoint, [Part("a", 256), Part("c", 128)], 256) is None


def test_a_plain_checkpoint_is_quantised(tmp_path) -> None:
    plain = torch.randn(192, 200).bfloat16()
    write(tmp_path, {"w": plain})
    order = torch.randperm(192)
    with open_checkpoint(tmp_path, quantised=False) as checkpoint:
        weight = fp8_matrix(checkpoint, [Part("w", 192, order)], 200)
    assert weight is not None and weight.codes.shape == (192, 256)
    error = (value(weight.codes, weight.scales)[:, :200] - plain[order].float()).abs()
    assert (error <= plain[order].float().abs() / 16 + 0.01).all()


@pytest.mark.parametrize("width", [128, 192])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_go_to_their_slots(tmp_path, width: int, fused: bool) -> None:
    """A replica, an empty slot, and zeros where they are padded."""
    hidden, names = 160, ("gate_proj", "up_proj", "down_proj")
    parts = {
        (e, name): stored(*((hidden, width) if name == "down_proj" else (width, hidden)))
        for e in range(2) for name in names
    }  # fmt: skip
    tensors: dict[str, tuple[Tensor, Tensor]] = {
        f"mlp.experts.{e}.{name}.weight": matrix for (e, name), matrix in parts.items()
    }
    if fused:
        both = [stored(2 * width, hidden) for _ in range(2)]
        downs = [parts[e, "down_proj"] for e in range(2)]
        for e, (codes, scales) in enumerate(both):
            gate, up = value(codes, scales).split(width)
            parts[e, "gate_proj"], parts[e, "up_proj"] = (gate, None), (up, None)
        tensors = {
            f"mlp.experts.{name}": tuple(
                torch.stack([t[i].view(torch.uint8) if i == 0 else t[i] for t in each])
                for i in range(2)
            )
            for name, each in (("gate_up_proj", both), ("down_proj", downs))
        }
        tensors = {name: (codes.view(FP8), scales) for name, (codes, scales) in tensors.items()}
    write(tmp_path, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        gate_up, down, gate_up_scale, down_scale = fp8_experts(
            checkpoint, "mlp", names, [1, -1, 0, 1], (hidden, width), CPU
        )
    tall = -(-width // 128) * 128
    assert gate_up.shape == (4, 2 * tall, 256) and down.shape == (4, 256, tall)
    up_and_gate, downs_ = (dequantise_weights(*t) for t in
                           ((gate_up, gate_up_scale), (down, down_scale)))  # fmt: skip
    for slot, expert in ((0, 1), (2, 0), (3, 1)):
        found = {
            "gate_proj": up_and_gate[slot, :width, :hidden],
            "up_proj": up_and_gate[slot, tall : tall + width, :hidden],
            "down_proj": downs_[slot, :hidden, :width],
        }
        for name, got in found.items():
            codes, scales = parts[expert, name]
            want = codes if scales is None else value(codes, scales)
            # Halves that begin within a block are quantised anew.
            anew = fused and width % 128 and name != "down_proj"
            assert torch.equal(got, want) or (anew and (got - want).norm() < 0.04 * want.norm())
        padded = up_and_gate[slot].abs().sum(), downs_[slot].abs().sum()
        held = [found[name].abs().sum() for name in names]
        torch.testing.assert_close(padded, (held[0] + held[1], held[2]))
    assert not up_and_gate[1].any() and not downs_[1].any()


def test_dummy_codes_have_the_size_that_keeps_what_passes_through() -> None:
    source = DummyWeights(torch.bfloat16, CPU, 0)
    codes, scales = source.get_fp8("w", (200, 512))
    assert codes.dtype == FP8 and scales.shape == (2, 4)
    assert value(codes, scales).std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert torch.equal(
        source.get_fp8("e", (128, 128), 3)[0].view(torch.uint8),
        DummyWeights(torch.bfloat16, CPU, 0).get_fp8("e", (128, 128), 3)[0].view(torch.uint8),
    )
