"""What every MoE layer of a rank shares, and the counts of what its experts got."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from crossdock.comm import Board, Counts
from crossdock.core import Placement, Transport
from crossdock.layers import MatMul
from crossdock.metrics import Recorder


class ExpertLoad:
    """Totals since the start, kept on the device: reading them is the only host sync.

    tokens_LE: this rank's tokens by the logical expert they chose. rows_LS: rows, from all ranks,
    that this rank's slots worked on. dropped_L: of this rank's (token, expert) pairs, those that
    were over the experts' capacity.
    """

    def __init__(self, placement: Placement, device: torch.device):
        layers = placement.slot_expert_LP.shape[0]
        shapes = ((layers, placement.num_experts), (layers, placement.slots_per_rank))
        self.tokens_LE, self.rows_LS = (
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes
        )
        self.dropped_L = torch.zeros(layers, dtype=torch.int64, device=device)

    def register(self, recorder: Recorder) -> None:
        recorder.rows_LS = self.rows_LS
        recorder.source("expert_tokens", self.tokens_LE.tolist, self.tokens_LE.zero_)
        recorder.source("slot_tokens", self.rows_LS.tolist, self.rows_LS.zero_)
        recorder.source("dropped_tokens", self.dropped_L.tolist, self.dropped_L.zero_)


@dataclass(frozen=True)
class RouterOptions:
    """What becomes of a router's choice.

    near: sets of ranks, nearest first; a token goes to a copy on the first set that has any, else
    to any copy. counts: how ranks exchange counts, where copies are chosen by quota; else None.
    capacity: an expert's most tokens of this rank over the mean; None: no limit. adjusted: the
    router's bias changes while serving. The last two change answers.
    """

    near: tuple[tuple[int, ...], ...] = ()
    counts: Counts | None = None
    capacity: float | None = None
    adjusted: bool = False


@dataclass(frozen=True, eq=False)
class MoEContext:
    """One per rank, shared by its MoE layers: `load` counts for all of them.

    `matmul(x_NI, w_OI, b_O or None)`: the products the model is built with. `board`: where the
    layers say which stage they are in. `workspace`: bytes that experts may hold at once, of all
    layers together. `fp8_experts`: the library of FP8 products. `routing`: as in `EngineConfig`.
    `apart`: the transport whose exchanges run beside other work, None where that is `transport`.
    """

    rank: int
    placement: Placement
    transport: Transport
    recorder: Recorder
    matmul: MatMul
    invariant: bool
    device: torch.device
    dtype: torch.dtype
    board: Board = field(default_factory=lambda: Board(0, 1))
    workspace: int = 256 << 20
    fp8_experts: Literal["triton", "deepgemm"] = "triton"
    routing: str = "real"
    apart: Transport | None = None
    router: RouterOptions = field(default_factory=RouterOptions)
    load: ExpertLoad = field(init=False)

    def __post_init__(self) -> None:
        load = ExpertLoad(self.placement, self.device)
        load.register(self.recorder)
        object.__setattr__(self, "load", load)


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """Of one layer, this rank's share: router [E, H] fp32, correction bias [E] fp32 or None, and
    the experts of its S slots, gate rows before up rows; FP8 ones with fp32 scales per 128x128,
    [S, 2F / 128, H / 128] and [S, H / 128, F / 128]."""

    router_EH: Tensor
    bias_E: Tensor | None
    gate_up_SFH: Tensor
    down_SHF: Tensor
    gate_up_scale_SAB: Tensor | None = None
    down_scale_SAB: Tensor | None = None
