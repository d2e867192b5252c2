"""The experts of one rank: SwiGLU MLPs over what arrived, in the layout in which it arrived."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from crossdock.core import ConfigError, Received
from crossdock.moe.context import MoEContext, MoEWeights
from crossdock.moe.experts.rows import FixedTiles, GroupedProduct, RowExperts, SlotBySlot

if TYPE_CHECKING:
    from crossdock.moe.experts.device import Products


class Experts(Protocol):
    """`slot_tensors`: the weights, [S, ...] each, a slot's part contiguous; what is written there
    counts from the next call on."""

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]: ...

    def __call__(self, received: Received) -> Tensor:
        """What combine takes of what dispatch gave."""
        ...


_ALIGNMENT = 16
_FP8 = torch.float8_e4m3fn

__all__ = ["Experts", "build_experts", "run_on_device"]


def run_on_device(
    device: torch.device, dtype: torch.dtype, hidden: int, width: int, invariant: bool
) -> bool:
    """Whether experts of this kind work without the host, so that a transport may deliver rows
    whose number only the device knows."""
    aligned = hidden % 128 == 0 and width % 128 == 0
    return device.type == "cuda" and dtype == torch.bfloat16 and aligned and not invariant


def build_experts(weights: MoEWeights, context: MoEContext, top_k: int, rows_S: Tensor) -> Experts:
    """
    Args:
        rows_S: where the rows that each slot works on are counted.

    Raises:
        ConfigError: FP8 weights over a transport that gives rows to the host.
    """
    if context.transport.on_device:
        # They import triton.
        from crossdock.moe.experts.device import DeviceExperts

        products = _products(weights, context)
        per_expert = context.transport.per_expert
        return DeviceExperts(products, context.workspace, per_expert, rows_S)
    if weights.gate_up_SFH.dtype == _FP8:
        raise ConfigError("FP8 experts run on CUDA over the nvlink transport alone")
    _, H, width = weights.down_SHF.shape
    itemsize = weights.down_SHF.element_size()
    # The grouped product refuses rows that do not start on 16 bytes; on CUDA it is made for BF16.
    aligned = all(n * itemsize % _ALIGNMENT == 0 for n in (H, width))
    served = context.device.type == "cpu" or context.dtype == torch.bfloat16
    product: GroupedProduct | SlotBySlot | FixedTiles
    if context.invariant and context.device.type == "cuda":
        product = FixedTiles(weights)
    elif context.invariant or not aligned or not served:
        product = SlotBySlot(weights.gate_up_SFH, weights.down_SHF, context)
    else:
        product = GroupedProduct(weights, context)
    # Per (row, k): the row, the gate and up halves, their product, the output, and fp32 sums.
    entry_bytes = (2 * H + 3 * width) * itemsize + 4 * H
    rows_at_once = max(1, context.workspace // (top_k * entry_bytes))
    return RowExperts(product, context.transport.per_expert, rows_at_once, rows_S)


def _products(weights: MoEWeights, context: MoEContext) -> "Products":
    from crossdock.moe.experts.bf16 import Bf16Products
    from crossdock.moe.experts.deepgemm import DeepGemmProducts, deepgemm_found
    from crossdock.moe.experts.fp8 import Fp8Products

    if weights.gate_up_SFH.dtype != _FP8:
        return Bf16Products(weights)
    if context.fp8_experts == "triton":
        return Fp8Products(weights)
    if not deepgemm_found(context.device):
        raise ConfigError(
            'fp8_experts = "deepgemm" needs a Hopper GPU and pip install "crossdock[deepgemm]"; '
            'use "triton"'
        )
    return DeepGemmProducts(weights)
