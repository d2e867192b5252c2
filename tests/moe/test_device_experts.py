"""Experts over rows whose number the host does not know: segments, waves and masked rows, against
a dense float64 reference; in Triton's interpreter where there is no GPU."""

import weakref

import pytest
import torch

from crossdock.core import CapacityError, Grouped, Masked
from crossdock.kernels.grouped_gemm import ALIGN
from crossdock.kernels.quant import dequantise_weights, quantise_weights
from crossdock.kernels.rounding import dequantise_blocks_torch, quantise_blocks_torch
from crossdock.kernels.segments import place_rows_torch
from crossdock.moe import MoEWeights
from crossdock.moe.experts.bf16 import Bf16Products
from crossdock.moe.experts.device import DeviceExperts
from crossdock.moe.experts.fp8 import Fp8Products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, HIDDEN, WIDTH, TOP_K = 3, 256, 128, 2
NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def products(fp8):
    """(products, gate_up, down as they count, fp32)"""
    gate_up = (torch.randn(SLOTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5).to(DEVICE, torch.bfloat16)
    down = (torch.randn(SLOTS, HIDDEN, WIDTH) / WIDTH**0.5).to(DEVICE, torch.bfloat16)
    router = torch.empty(0)
    if not fp8:
        weights = MoEWeights(router, None, gate_up, down)
        return Bf16Products(weights), gate_up.float(), down.float()
    (g, gs), (d, ds) = quantise_weights(gate_up), quantise_weights(down)
    weights = MoEWeights(router, None, g, d, gs, ds)
    return Fp8Products(weights), dequantise_weights(g, gs), dequantise_weights(d, ds)


def dense(x_NH, gate_up, down, slot):
    gate, up = (x_NH.double() @ gate_up[slot].double().T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down[slot].double().T


def grouped(N, fp8, fill):
    """Random rows; those that no slot wants are NaN."""
    slots_NK = torch.rand(N, SLOTS).argsort(1)[:, :TOP_K]
    slots_NK = slots_NK.masked_fill(torch.rand(N, TOP_K) > fill, -1)
    weights_NK = torch.rand(N, TOP_K).masked_fill(slots_NK < 0, 0.0)
    x_NH = torch.randn(N, HIDDEN).bfloat16()
    x_NH[(slots_NK < 0).all(1)] = NAN
    counts, offsets, rows, places = place_rows_torch(slots_NK, SLOTS, ALIGN)
    capacity = -(-(N * TOP_K + SLOTS * (ALIGN - 1)) // ALIGN) * ALIGN
    rows_P = torch.full((capacity,), 1 << 30)  # beyond the segments anything
    rows_P[: len(rows)] = rows
    x, scales, value = x_NH, None, x_NH
    if fp8:
        x, scales = quantise_blocks_torch(x_NH)
        value = dequantise_blocks_torch(x, scales, torch.float32)
        scales = scales.to(DEVICE)
    ints = (t.to(DEVICE, torch.int32) for t in (offsets, rows_P, places, counts))
    received = Grouped(x.to(DEVICE), scales, weights_NK.to(DEVICE), *ints)
    return received, value.to(DEVICE), slots_NK, weights_NK


def reference(value, slots_NK, weights_NK, gate_up, down):
    """y_NKH per expert, and reduced y_NH."""
    y = torch.zeros(*slots_NK.shape, HIDDEN, dtype=torch.float64)
    for s in range(SLOTS):
        here = slots_NK == s
        row = here.nonzero()[:, 0]
        y[here] = dense(value[row.to(DEVICE)], gate_up, down, s).cpu()
    return y, (y * weights_NK.double().unsqueeze(-1)).sum(1)


def error(got, want):
    return ((got.double().cpu() - want).norm() / want.norm().clamp_min(1e-9)).item()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fill", [1.0, 0.5, 0.0])
def test_grouped_rows_by_place(fp8, fill):
    runner, gate_up, down = products(fp8)
    received, value, slots_NK, weights_NK = grouped(40, fp8, fill)
    rows_S = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
    y_PH = DeviceExperts(runner, 1 << 30, False, rows_S)(received)
    assert rows_S.tolist() == torch.bincount(slots_NK[slots_NK >= 0], minlength=SLOTS).tolist()
    assert len(y_PH) == len(received.rows_P)
    here = slots_NK >= 0
    want, _ = reference(value, slots_NK, weights_NK, gate_up, down)
    got = y_PH[received.places_NK.cpu()[here].long().to(DEVICE)]
    assert error(got, want[here]) < (0.05 if fp8 else 0.01)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_waves_add_up_to_the_same_rows(fp8):
    runner, gate_up, down = products(fp8)
    received, value, slots_NK, weights_NK = grouped(150, fp8, 0.8)
    rows_S = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
    experts = DeviceExperts(runner, ALIGN * runner.place_bytes, False, rows_S)
    assert experts.wave_places == ALIGN < len(received.rows_P)
    y_NH = experts(received)
    _, want = reference(value, slots_NK, weights_NK, gate_up, down)
    assert y_NH.shape == want.shape and not y_NH.isnan().any()
    assert error(y_NH, want) < (0.05 if fp8 else 0.01)
    with pytest.raises(CapacityError, match=r"places of .* exceed the experts' workspace of 128"):
        DeviceExperts(runner, 1, True, rows_S)(received)


def test_a_wave_begins_when_the_one_before_is_freed():
    runner, _, _ = products(False)
    received, *_ = grouped(150, False, 0.8)
    waves = list[weakref.ref[torch.Tensor]]()

    class Counting:
        place_bytes, slot_tensors = runner.place_bytes, runner.slot_tensors

        def grouped(self, wave):
            assert all(y() is None for y in waves)
            y_WH = runner.grouped(wave)
            waves.append(weakref.ref(y_WH))
            return y_WH

    rows_S = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
    DeviceExperts(Counting(), ALIGN * runner.place_bytes, False, rows_S)(received)
    assert len(waves) > 2


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_masked_rows(fp8):
    runner, gate_up, down = products(fp8)
    capacity, counts = 20, [17, 0, 1]
    x = torch.randn(SLOTS, capacity, HIDDEN).bfloat16()
    for s, count in enumerate(counts):
        x[s, count:] = NAN
    scales, value = None, x
    if fp8:
        x, scales = quantise_blocks_torch(x)
        value = dequantise_blocks_torch(x, scales, torch.float32)
        scales = scales.to(DEVICE)
    counts_S = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    rows_S = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
    received = Masked(x.to(DEVICE), scales, counts_S, expected_rows=6)
    y_SCH = DeviceExperts(runner, 1, False, rows_S)(received)
    assert rows_S.tolist() == counts
    for s, count in enumerate(counts):
        if count:
            want = dense(value[s, :count].to(DEVICE), gate_up, down, s).cpu()
            assert error(y_SCH[s, :count], want) < (0.05 if fp8 else 0.01)
