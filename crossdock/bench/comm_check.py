"""A case's rows and sums against the collective transport, exactly, on fresh data.

Dispatch: normal rows; for FP8 the codes and scales that the twin makes of the rows the collective
transport brought. Combine: what experts would give is small whole numbers and weights are powers of
two, so every sum is exact in any order; slots have different factors, so a swapped row shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.bench.comm_case import CommCase, Inputs, draw
from crossdock.bench.comm_nvlink import SETS, NvlinkCase
from crossdock.comm import World, build_transport
from crossdock.core import CrossdockError, Routing, Rows, Transport
from crossdock.kernels.rounding import quantise_blocks_torch
from crossdock.metrics import Recorder

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Entries:
    """Every (received row, expert) pair: its place among the rows for products, its slot, and its
    row among those that came (of the collective transport's)."""

    place_E: Tensor
    slot_E: Tensor
    row_E: Tensor
    k_E: Tensor


def check_case(nvlink: NvlinkCase, world: World, seed: int) -> None:
    """Collective; each buffer set once.

    Raises:
        CrossdockError: something differs; says what.
    """
    case, kept = nvlink.case, nvlink.inputs
    oracle = build_transport(
        "collective", world, max_tokens=case.max_tokens, hidden=case.hidden, top_k=case.top_k,
        slots_per_rank=case.slots, dtype=torch.bfloat16, per_expert=case.per_expert,
        recorder=Recorder(),
    )  # fmt: skip
    for at in range(SETS):
        nvlink.inputs = draw(case, world.rank, seed + at, world.device)
        _poison(nvlink, world)
        _check_rows(nvlink, oracle, at)
        _poison(nvlink, world)
        routing = nvlink.inputs.routing
        twos_TK = 2.0 ** torch.randint(-1, 2, routing.weights_TK.shape, device=world.device)
        nvlink.inputs = Inputs(nvlink.inputs.x_TH, Routing(routing.slots_TK, twos_TK))
        check = _check_grouped if nvlink.x_SCH is None else _check_masked
        check(nvlink, oracle, at)
        nvlink.exchange.check()
    nvlink.inputs = kept


def _poison(nvlink: NvlinkCase, world: World) -> None:
    """NaN in all staging and in the rows for products; flags stay as they are."""
    nvlink.poison()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.lockstep.exchange([1])  # nobody pushes rows before all have done so


def _check_rows(nvlink: NvlinkCase, oracle: Transport, at: int) -> None:
    """Dispatch to rows, and combine of rows already reduced (one for each expert: as they are)."""
    x_TH, routing = nvlink.inputs.x_TH, nvlink.inputs.routing
    want, ticket = oracle.dispatch_end(oracle.dispatch_begin(x_TH, routing))
    assert isinstance(want, Rows)
    arrived = nvlink.rows(at)
    came_N = (arrived.slots_NK >= 0).any(1)
    _same(came_N.sum(), torch.tensor(len(want.x_NH), device=came_N.device), "number of rows")
    scales = None if arrived.scales is None else arrived.scales[came_N]
    _same_rows(arrived.rows[came_N], scales, want.x_NH)
    _same(arrived.slots_NK[came_N], want.slots_NK, "slots")
    _same(arrived.weights_NK[came_N], want.weights_NK, "weights")
    _same(arrived.counts_S.long(), _counts(want, nvlink.case), "rows of each slot")
    shape = want.slots_NK.shape if nvlink.case.per_expert else want.slots_NK.shape[:1]
    y = torch.randn(*shape, x_TH.shape[1], device=x_TH.device).bfloat16()
    home_TH = oracle.combine_end(oracle.combine_begin(y, ticket))
    full = y.new_full((len(came_N), *y.shape[1:]), NAN)
    full[came_N] = y
    _same(nvlink.home_of_rows(at, full, arrived), home_TH, "sums of reduced rows")


def _check_grouped(nvlink: NvlinkCase, oracle: Transport, at: int) -> None:
    want = _received(nvlink, oracle)
    arrived, segments, gathered = nvlink.grouped(at)
    entries = _entries(segments.places_NK, arrived.slots_NK, want)
    row_N = torch.arange(len(arrived.slots_NK), device=arrived.slots_NK.device)
    row_E = row_N[(arrived.slots_NK >= 0).any(1)][entries.row_E]
    _same(segments.rows[entries.place_E].long(), row_E, "rows of segments")
    _same_segments(entries, segments.offsets[:-1], arrived.counts_S)
    x_PH, scale_PB = gathered
    scales = None if scale_PB is None else scale_PB[entries.place_E]
    _same_rows(x_PH[entries.place_E], scales, want.x_NH[entries.row_E])
    _check_sums(
        nvlink, oracle, entries, len(segments.rows),
        lambda y_PH: nvlink.home_of_segments(at, y_PH, arrived, segments),
    )  # fmt: skip


def _check_masked(nvlink: NvlinkCase, oracle: Transport, at: int) -> None:
    want = _received(nvlink, oracle)
    masked = nvlink.masked(at)
    slots, capacity, _ = masked.x.shape
    most = nvlink.case.max_tokens
    token_N = torch.arange(len(masked.places), device=masked.places.device) % most
    came_N = token_N < masked.tokens_R.repeat_interleave(most)  # nothing is written for others
    places_NK = masked.places.masked_fill(~came_N[:, None], -1)
    slots_NK = torch.where(places_NK >= 0, places_NK // capacity, -1).long()
    entries = _entries(places_NK, slots_NK, want)
    starts_S = torch.arange(slots, device=slots_NK.device) * capacity
    _same(masked.counts_S.long(), _counts(want, nvlink.case), "rows of each slot")
    _same_segments(entries, starts_S, masked.counts_S)
    scales = None if masked.scales is None else masked.scales.flatten(0, 1)[entries.place_E]
    _same_rows(masked.x.flatten(0, 1)[entries.place_E], scales, want.x_NH[entries.row_E])

    _check_sums(
        nvlink, oracle, entries, slots * capacity,
        lambda y_PH: nvlink.home_of_masked(at, y_PH.view(masked.x.shape), masked),
    )  # fmt: skip


def _received(nvlink: NvlinkCase, oracle: Transport) -> Rows:
    inputs = nvlink.inputs
    rows, _ = oracle.dispatch_end(oracle.dispatch_begin(inputs.x_TH, inputs.routing))
    assert isinstance(rows, Rows)
    return rows


def _entries(places_NK: Tensor, slots_NK: Tensor, want: Rows) -> Entries:
    here_NK = places_NK >= 0
    row_N = here_NK.any(1).cumsum(0) - 1  # both keep the order of (source, token)
    n, k = here_NK.nonzero().unbind(1)
    entries = Entries(places_NK[n, k].long(), slots_NK[n, k], row_N[n], k)
    _same(here_NK.sum(), (want.slots_NK >= 0).sum(), "number of copies")
    _same(entries.slot_E, want.slots_NK[entries.row_E, entries.k_E], "slots of copies")
    return entries


def _same_segments(entries: Entries, starts_S: Tensor, counts_S: Tensor) -> None:
    """Every slot's rows fill its first places."""
    within_E = entries.place_E - starts_S[entries.slot_E]
    inside = bool(((within_E >= 0) & (within_E < counts_S[entries.slot_E])).all())
    if not inside or len(entries.place_E.unique()) != len(entries.place_E):
        raise CrossdockError("the check failed: copies lie outside their slot, or on each other")


def _check_sums(
    nvlink: NvlinkCase,
    oracle: Transport,
    entries: Entries,
    places: int,
    combine: Callable[[Tensor], Tensor],
) -> None:
    x_TH, routing = nvlink.inputs.x_TH, nvlink.inputs.routing
    whole_TH = torch.randint(-8, 9, x_TH.shape, device=x_TH.device).bfloat16()
    want, ticket = oracle.dispatch_end(oracle.dispatch_begin(whole_TH, routing))
    assert isinstance(want, Rows)
    y_PH = x_TH.new_full((places, x_TH.shape[1]), NAN)
    factor_E = 1 + entries.slot_E % 3
    y_PH[entries.place_E] = want.x_NH[entries.row_E] * factor_E[:, None].bfloat16()
    factor_NK = (1 + want.slots_NK % 3).float()
    if nvlink.case.per_expert:
        y = want.x_NH.unsqueeze(1) * factor_NK.bfloat16().unsqueeze(-1)
    else:
        factor_NK = (factor_NK * want.weights_NK).masked_fill(want.slots_NK < 0, 0.0)
        y = (want.x_NH.float() * factor_NK.sum(1, keepdim=True)).bfloat16()
    home_TH = oracle.combine_end(oracle.combine_begin(y, ticket))
    _same(combine(y_PH), home_TH, "sums")


def _counts(want: Rows, case: CommCase) -> Tensor:
    return torch.bincount(want.slots_NK[want.slots_NK >= 0], minlength=case.slots)


def _same_rows(rows: Tensor, scales: Tensor | None, want_NH: Tensor) -> None:
    if scales is None:
        _same(rows, want_NH, "rows")
        return
    codes, want_scales = quantise_blocks_torch(want_NH)
    _same(rows.view(torch.uint8), codes.view(torch.uint8), "codes of rows")
    _same(scales, want_scales, "scales of rows")


def _same(got: Tensor, want: Tensor, what: str) -> None:
    if got.shape != want.shape or not torch.equal(got, want):
        differ = int((got != want).sum()) if got.shape == want.shape else "all"
        raise CrossdockError(
            f"the check against the collective transport failed: {what} differ, {differ} of "
            f"{want.numel()} values"
        )
