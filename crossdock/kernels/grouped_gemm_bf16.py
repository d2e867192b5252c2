"""BF16 products of grouped rows, with and without SwiGLU: a kernel of our own on Hopper,
`torch._grouped_mm` elsewhere. Layouts and twins are in `grouped_gemm`."""

import torch
import triton
from torch import Tensor

from crossdock.kernels.grouped_gemm import ALIGN, Segments
from crossdock.kernels.grouped_gemm_fp8 import GROUP_M, is_hopper, multiprocessors
from crossdock.kernels.swiglu import swiglu_rows

STAGES = 4


def grouped_bf16(x_NI: Tensor, w_SOI: Tensor, segments: Segments) -> Tensor:
    """[N, O] of rows sorted by slot; N a multiple of 128, I of 64, O of 8. Rows from the rows in
    use on are undefined. No host synchronisation.

    Raises:
        ValueError: other shapes or dtypes.
    """
    _check(x_NI, w_SOI, w_SOI.shape[1], segments)
    if is_hopper(x_NI):
        return _launch_hopper(x_NI, w_SOI, segments, gated=False)
    return grouped_torch(x_NI, w_SOI, segments)


def grouped_gated_bf16(x_NI: Tensor, w_S2FI: Tensor, segments: Segments) -> Tensor:
    """[N, F], `silu(gate) * up` of the products with the first F rows of a slot's weight and the
    others; as `grouped_bf16`, F a multiple of 8."""
    _check(x_NI, w_S2FI, w_S2FI.shape[1] // 2, segments)
    if is_hopper(x_NI):
        return _launch_hopper(x_NI, w_S2FI, segments, gated=True)
    return swiglu_rows(grouped_torch(x_NI, w_S2FI, segments), segments.offsets_S1[-1:])


def grouped_torch(x_NI: Tensor, w_SOI: Tensor, segments: Segments) -> Tensor:
    """As `grouped_bf16`, by torch on any device."""
    return torch._grouped_mm(x_NI, w_SOI.transpose(1, 2), offs=segments.offsets_S1[1:])


def _launch_hopper(x_NI: Tensor, w_SOI: Tensor, segments: Segments, gated: bool) -> Tensor:
    # Imported here: Gluon is needed on Hopper only.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from crossdock.kernels.grouped_gemm_hopper_bf16 import hopper_bf16_kernel

    slots, out_width, width = w_SOI.shape
    if gated:
        out_width //= 2
    out_NO = torch.empty((len(x_NI), out_width), dtype=torch.bfloat16, device=x_NI.device)
    if not len(x_NI):
        return out_NO
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    most_tiles = len(x_NI) // ALIGN * triton.cdiv(out_width, 128 if gated else 256)
    hopper_bf16_kernel[(min(multiprocessors(x_NI.device.index), most_tiles),)](
        TensorDescriptor.from_tensor(x_NI, [128, 64], layout),
        TensorDescriptor.from_tensor(w_SOI.flatten(0, 1), [128, 64], layout),
        TensorDescriptor.from_tensor(out_NO, [64, 128], layout),
        segments.tile_slots_M, segments.offsets_S1, slots, out_width, width,
        GATED=gated, GROUP_M=GROUP_M, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out_NO


def _check(x_NI: Tensor, w: Tensor, out_width: int, segments: Segments) -> None:
    if x_NI.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        raise ValueError(f"expected BF16 rows and weights; got {x_NI.dtype} and {w.dtype}")
    (rows, width), slots = x_NI.shape, len(segments.offsets_S1) - 1
    if width != w.shape[2] or width % 64 or out_width % 8 or len(w) != slots:
        raise ValueError(
            f"rows of {width} for {slots} slots and weights {tuple(w.shape)}: expected as many "
            "slots, the same width, a multiple of 64, and outputs a multiple of 8"
        )
    if rows % ALIGN or len(segments.tile_slots_M) * ALIGN != rows:
        raise ValueError(
            f"grouped layout: {rows} rows need a multiple of {ALIGN} and as many tile slots; "
            f"got {len(segments.tile_slots_M)} tile slots"
        )
    if not (x_NI.is_contiguous() and w.is_contiguous()):
        raise ValueError("rows and weights must be contiguous")
