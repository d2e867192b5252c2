"""The whole layer against fp32 products and the collective transport."""

import torch
from torch import Tensor

from crossdock.comm import World, build_transport
from crossdock.core import CrossdockError, Routing, Rows
from crossdock.kernels.quant import dequantise_rows, dequantise_weights
from crossdock.kernels.rounding import quantise_blocks_torch
from crossdock.metrics import Recorder
from crossdock.moe import MoEWeights

MOST_ERROR = 2e-2
"""Norm of the difference over fp32's. Rows are rounded as the layer rounds them, so what is left is
BF16 between the products."""


def check_layer(
    out_TH: Tensor, x_TH: Tensor, routing: Routing, weights: MoEWeights, world: World, most: int
) -> float:
    """Collective; the error.

    Raises:
        CrossdockError: too large.
    """
    slots, top_k = len(weights.down_SHF), routing.slots_TK.shape[1]
    oracle = build_transport(
        "collective", world, max_tokens=most, hidden=x_TH.shape[1], top_k=top_k,
        slots_per_rank=slots, dtype=torch.bfloat16, per_expert=False, recorder=Recorder(),
    )  # fmt: skip
    rows, ticket = oracle.dispatch_end(oracle.dispatch_begin(x_TH, routing))
    assert isinstance(rows, Rows)
    y_NH = torch.zeros(rows.x_NH.shape, device=x_TH.device)
    for s in range(slots):
        n, k = (rows.slots_NK == s).nonzero().unbind(1)
        y = _expert(rows.x_NH[n], weights, s)
        y_NH.index_add_(0, n, y * rows.weights_NK[n, k, None])
    home_TH = oracle.combine_end(oracle.combine_begin(y_NH.bfloat16(), ticket)).float()
    error = float((out_TH.float() - home_TH).norm() / home_TH.norm().clamp_min(1e-30))
    if not error < MOST_ERROR:
        raise CrossdockError(
            f"rank {world.rank}: the layer differs from fp32 by {error:.3g} of its norm, expected "
            f"less than {MOST_ERROR}"
        )
    return error


def _expert(x_NH: Tensor, weights: MoEWeights, s: int) -> Tensor:
    gate_up_FH, down_HF = weights.gate_up_SFH[s].float(), weights.down_SHF[s].float()
    x_NH = x_NH.float()
    fp8 = weights.gate_up_scale_SAB is not None
    if fp8:
        assert weights.gate_up_scale_SAB is not None and weights.down_scale_SAB is not None
        gate_up_FH = dequantise_weights(weights.gate_up_SFH[s], weights.gate_up_scale_SAB[s])
        down_HF = dequantise_weights(weights.down_SHF[s], weights.down_scale_SAB[s])
        x_NH = dequantise_rows(*quantise_blocks_torch(x_NH))
    gate_NF, up_NF = (x_NH @ gate_up_FH.T).bfloat16().float().chunk(2, -1)
    a_NF = torch.nn.functional.silu(gate_NF) * up_NF
    if fp8:
        a_NF = dequantise_rows(*quantise_blocks_torch(a_NF))
    return (a_NF @ down_HF.T).bfloat16().float()
