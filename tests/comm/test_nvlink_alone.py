"""One rank's exchange in this process, in Triton's interpreter or on a CUDA device: what it refuses
and what it says of slots it cannot serve."""

import pytest
import torch

from crossdock.comm.nvlink import NvlinkExchange, NvlinkLayout
from crossdock.comm.symmetric import SymmetricBuffer
from crossdock.core import CapacityError, CrossdockError

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
H, K, S, T = 256, 3, 4, 5
# Where there is a CUDA device these run on it and belong to the tests for GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


def make(fp8=False, dtype=torch.bfloat16, per_expert=False, max_tokens=T, hidden=H, top_k=K):
    layout = NvlinkLayout(1, max_tokens, hidden, top_k, dtype.itemsize, fp8, per_expert)
    local = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    for at in range(2):
        local[at * layout.set_bytes : at * layout.set_bytes + layout.records] = 0
    table = torch.tensor([local.data_ptr()], dtype=torch.int64, device=DEVICE)
    buffer = SymmetricBuffer(local, table, None)
    return NvlinkExchange(0, layout, buffer, S, dtype, 5.0)


def step(tokens=T, hidden=H, top_k=K, dtype=torch.bfloat16):
    x = torch.randint(-8, 9, (tokens, hidden), device=DEVICE).to(dtype)
    slots = torch.rand(tokens, max(S, top_k), device=DEVICE).argsort(1)[:, :top_k] % S
    weights = 2.0 ** torch.randint(-1, 2, (tokens, top_k), device=DEVICE)
    return x, slots.contiguous(), weights


def room(exchange):
    layout = exchange.layout
    shape = (S, layout.cells, layout.hidden)
    dtype = torch.float8_e4m3fn if layout.fp8 else exchange.dtype
    x = torch.full(shape, float("nan"), device=DEVICE).to(dtype)
    scales = None
    if layout.fp8:
        scales = torch.full((*shape[:2], layout.hidden // 128), float("nan"), device=DEVICE)
    return x, scales


def settled(exchange):
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    exchange.check()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trips(fused, dtype):
    exchange = make(dtype=dtype)
    for tokens in (T, 0, 2):
        x, slots, weights = step(tokens, dtype=dtype)
        slots[torch.rand(slots.shape, device=DEVICE) < 0.3] = -1
        given = slots, weights
        if fused:
            masked = exchange.dispatch_masked_fused(0, x, *given, *room(exchange))
            out = exchange.combine_masked_fused(0, masked.x, masked, *given)
        else:
            exchange.dispatch_send(0, x, *given)
            masked = exchange.dispatch_masked(0, *room(exchange))
            exchange.combine_masked(0, masked.x, masked)
            out = exchange.combine_home(0, *given)
        settled(exchange)
        assert torch.equal(masked.counts_S.long(), torch.bincount(slots[slots >= 0], minlength=S))
        factor = weights.masked_fill(slots < 0, 0.0).sum(1, keepdim=True)
        assert torch.equal(out.float(), x.float() * factor)


@pytest.mark.parametrize("wrong", [S, 2**33, -2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_slot_that_no_rank_has_is_named(wrong, fused):
    exchange = make()
    x, slots, weights = step()
    slots[3, 1] = wrong
    before = exchange._buffer.local[exchange.layout.set_bytes :].clone()
    if fused:
        arrived = exchange.dispatch_rows_fused(0, x, slots, weights)
    else:
        exchange.dispatch_send(0, x, slots, weights)
        arrived = exchange.dispatch_rows(0)
    with pytest.raises(CrossdockError, match=f"token 3 of rank 0 .* slots are 0 to {S - 1}"):
        settled(exchange)
    # The others arrived, nothing went where it should not, and the exchange stays dead.
    kept = slots.clone()
    kept[3, 1] = -1
    assert torch.equal(arrived.slots_NK, kept)
    assert torch.equal(exchange._buffer.local[exchange.layout.set_bytes :], before)
    with pytest.raises(CrossdockError, match="token 3"):
        exchange.dispatch_send(1, *step())


@pytest.mark.parametrize("fused", [False, True])
def test_slots_named_twice_are_no_overrun(fused):
    exchange = make()
    x, slots, weights = step()
    slots.fill_(1)  # T * K copies for T places
    q = torch.full((S + 1, T, H), 7.0, dtype=x.dtype, device=DEVICE)
    if fused:
        masked = exchange.dispatch_masked_fused(0, x, slots, weights, q[:S], None)
    else:
        exchange.dispatch_send(0, x, slots, weights)
        masked = exchange.dispatch_masked(0, q[:S], None)
    with pytest.raises(CapacityError, match="rank 0 name a slot of rank 0 more than once"):
        settled(exchange)
    assert bool((q[2:] == 7.0).all()) and bool((q[0] == 7.0).all())
    assert int((masked.places >= 0).sum()) == T


def test_what_does_not_suit_the_buffers_is_refused_before_a_launch():
    exchange = make()
    x, slots, weights = step()
    for given, message in (
        (step(T + 1), f"{T + 1} tokens in a step, the buffers hold {T}"),
        ((x.float(), slots, weights), r"x must be contiguous torch.bfloat16 \[5, 256\]"),
        ((x[:, :128], slots, weights), r"x must be .* got torch.bfloat16 \[5, 128\]"),
        ((x.t().contiguous().t(), slots, weights), "x must be contiguous"),
        ((x, slots.int(), weights), "slots must be contiguous torch.int64"),
        ((x, slots[:, :2].contiguous(), weights), r"slots must be .* \[5, 3\]"),
        ((x, slots, weights.double()), "weights must be contiguous torch.float32"),
    ):
        with pytest.raises(CrossdockError, match=message):
            exchange.dispatch_send(0, *given)
        with pytest.raises(CrossdockError, match=message):
            exchange.dispatch_rows_fused(0, *given)
    with pytest.raises(CapacityError, match=f"{T} places per slot, got {T} and {T - 1}"):
        exchange.dispatch_masked(0, x.new_empty(S, T - 1, H), None)
    with pytest.raises(CrossdockError, match=r"masked rows must be .* \[4, 5, 256\]"):
        exchange.dispatch_masked(0, x.new_empty(S + 1, T, H), None)
    with pytest.raises(CrossdockError, match="FP8 rows, and they alone"):
        exchange.dispatch_masked(0, x.new_empty(S, T, H), x.new_empty(S, T, 2).float())
    exchange.dispatch_send(0, x, slots, weights)
    arrived = exchange.dispatch_rows(0)
    with pytest.raises(CrossdockError, match=r"y must be .* \[5, 256\].* got"):
        exchange.combine_rows(0, arrived.rows[:3], arrived)
    exchange.combine_rows(0, arrived.rows.clone(), arrived)  # and it still works
    with pytest.raises(CrossdockError, match="weights must be"):
        exchange.combine_home(0, slots, weights[:3])
    with pytest.raises(CapacityError, match=f"{T + 1} tokens in a step"):
        exchange.combine_home(0, *step(T + 1)[1:])
    settled(exchange)


@pytest.mark.parametrize("hidden, top_k", [(128, 16), (384, 1)])
@pytest.mark.parametrize("per_expert", [False, True])
def test_narrow_rows_and_many_experts(hidden, top_k, per_expert):
    exchange = make(per_expert=per_expert, hidden=hidden, top_k=top_k)
    x, slots, weights = step(hidden=hidden, top_k=top_k)
    arrived = exchange.dispatch_rows_fused(0, x, slots, weights)
    segments = exchange.place(0, arrived, 4)
    y = torch.full((len(segments.rows), hidden), float("nan"), device=DEVICE).to(x.dtype)
    filled = segments.rows >= 0
    filled &= torch.arange(len(filled), device=DEVICE) < segments.offsets[-1]
    y[filled] = arrived.rows[segments.rows[filled].long()]
    out = exchange.combine_segments_fused(0, y, arrived, segments, slots, weights)
    settled(exchange)
    assert torch.equal(out.float(), (x.float() * weights.sum(1, keepdim=True)).to(x.dtype).float())
