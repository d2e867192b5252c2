"""Launchers: FP8 grouped and masked GEMM. Layouts and twins are in `grouped_gemm`."""

import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from crossdock.kernels import grouped_gemm_tiles as tiles
from crossdock.kernels.grouped_gemm import ALIGN, Segments
from crossdock.kernels.grouped_gemm_gather import gather_rows
from crossdock.kernels.grouped_gemm_triton import grouped_kernel, masked_kernel
from crossdock.kernels.quant import FP8, INTERPRET
from crossdock.kernels.rounding import BLOCK

# Row tiles that share their weights before a program moves to the next column of tiles.
GROUP_M = 8


def grouped_gemm_fp8(
    x_NI: Tensor,
    x_scale_NB: Tensor,
    w_SOI: Tensor,
    w_scale_SAB: Tensor,
    segments: Segments,
    rows_N: Tensor | None = None,
    tile: tiles.Tile | tiles.HopperTile | None = None,
) -> Tensor:
    """BF16 [N, O] of FP8 rows sorted by slot; N is a multiple of 128.

    With rows_N (int32 [N]) the rows are gathered on the way: row n is x_NI[rows_N[n]], zero where
    the index is -1, and x_NI may have any number of rows. Rows from the rows in use on are
    unwritten. No host synchronisation.
    """
    _check(x_NI, x_scale_NB, w_SOI, w_scale_SAB)
    slots, out_width, width = w_SOI.shape
    rows = len(x_NI) if rows_N is None else len(rows_N)
    if rows % ALIGN or len(segments.tile_slots_M) * ALIGN != rows:
        raise ValueError(
            f"grouped layout: {rows} rows need a multiple of {ALIGN} and as many tile slots; "
            f"got {len(segments.tile_slots_M)} tile slots"
        )
    out_NO = torch.empty((rows, out_width), dtype=torch.bfloat16, device=x_NI.device)
    if rows == 0:
        return out_NO
    if tile is None:
        tile = tiles.HopperTile() if is_hopper(x_NI) else tiles.GROUPED_FP8
    if isinstance(tile, tiles.HopperTile):
        if rows_N is not None:
            # Its copies take consecutive rows only. Writing and reading each row once more costs
            # less than gathering the rows again for every column of tiles.
            end = segments.offsets_S1[-1:]
            x_NI, gathered = gather_rows(x_NI, x_scale_NB, rows_N, end)
            assert gathered is not None
            x_scale_NB = gathered
        _launch_hopper(
            tile, x_NI, x_scale_NB, w_SOI, w_scale_SAB, out_NO,
            segments.tile_slots_M, segments.offsets_S1, 0,
            rows // 128 * triton.cdiv(out_width, 256),
        )  # fmt: skip
        return out_NO
    most_tiles = rows // tile.bm * triton.cdiv(out_width, tile.bo)
    grouped_kernel[(min(_programs(x_NI), most_tiles),)](
        _describe(x_NI, tile.bm, tile.bk) if rows_N is None else x_NI,
        x_scale_NB, rows_N, _describe(w_SOI.flatten(0, 1), tile.bo, tile.bk), w_scale_SAB, out_NO,
        segments.offsets_S1, segments.tile_slots_M, slots, out_width, *x_scale_NB.stride(),
        width=width, GATHER=rows_N is not None, BM=tile.bm, BO=tile.bo, BK=tile.bk,
        GROUP_M=GROUP_M, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_NO


def masked_gemm_fp8(
    x_SCI: Tensor,
    x_scale_SCB: Tensor,
    w_SOI: Tensor,
    w_scale_SAB: Tensor,
    counts_S: Tensor,
    expected_rows: int,
    tile: tiles.Tile | tiles.HopperTile | None = None,
) -> Tensor:
    """BF16 [S, C, O]; counts_S int32 on the device, rows beyond a count are unwritten.

    expected_rows only picks the tile: any counts up to C are right with any of them.
    """
    _check(x_SCI, x_scale_SCB, w_SOI, w_scale_SAB)
    if tile is None:
        on_hopper = is_hopper(x_SCI)
        tile = (
            tiles.tile_for(tiles.HOPPER_MASKED_FP8, expected_rows)
            if on_hopper
            else tiles.tile_for(tiles.MASKED_FP8, expected_rows)
        )
    return _masked(tile, x_SCI, x_scale_SCB, w_SOI, w_scale_SAB, counts_S)


def _masked(
    tile: tiles.Tile | tiles.HopperTile,
    x_SCI: Tensor,
    x_scale_SCB: Tensor,
    w_SOI: Tensor,
    w_scale_SAB: Tensor,
    counts_S: Tensor,
) -> Tensor:
    slots, capacity, width = x_SCI.shape
    out_width = w_SOI.shape[1]
    check_counts(slots, w_SOI, counts_S)
    out_SCO = torch.empty((slots, capacity, out_width), dtype=torch.bfloat16, device=x_SCI.device)
    if out_SCO.numel() == 0:
        return out_SCO
    x_NI = x_SCI.view(slots * capacity, width)
    x_scale_NB = x_scale_SCB.view(slots * capacity, -1)
    if isinstance(tile, tiles.HopperTile):
        most_tiles = slots * triton.cdiv(capacity, 128) * triton.cdiv(out_width, 256)
        _launch_hopper(
            tile, x_NI, x_scale_NB, w_SOI, w_scale_SAB, out_SCO,
            counts_S, None, capacity, most_tiles,
        )  # fmt: skip
        return out_SCO
    more = tile.more or tile.bm
    masked_kernel[(triton.cdiv(out_width, tile.bo), slots)](
        _describe(x_NI, tile.bm, tile.bk), _describe(x_NI, more, tile.bk), x_scale_NB,
        _describe(w_SOI.flatten(0, 1), tile.bo, tile.bk), w_scale_SAB, out_SCO, counts_S,
        capacity, out_width, *x_scale_NB.stride(),
        width=width, SWAP=tile.swap, BM=tile.bm, MORE=tile.more, BO=tile.bo, BK=tile.bk,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_SCO


def _launch_hopper(
    tile: tiles.HopperTile,
    x_NI: Tensor,
    x_scale_NB: Tensor,
    w_SOI: Tensor,
    w_scale_SAB: Tensor,
    out: Tensor,
    index: Tensor,
    offsets_S1: Tensor | None,
    capacity: int,
    most_tiles: int,
) -> None:
    # Imported here: Gluon is needed on Hopper only.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from crossdock.kernels.grouped_gemm_hopper import hopper_kernel

    slots, out_width, width = w_SOI.shape
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    w_NI = w_SOI.flatten(0, 1)
    hopper_kernel[(min(multiprocessors(x_NI.device.index), most_tiles),)](
        GluonDescriptor.from_tensor(x_NI, [128, 128], layout), x_scale_NB,
        GluonDescriptor.from_tensor(w_NI, [128, 128], layout), w_scale_SAB, out, index,
        index if offsets_S1 is None else offsets_S1, slots, capacity, out_width, width,
        *x_scale_NB.stride(), MASKED=offsets_S1 is None, GROUP_M=GROUP_M,
        STAGES=tile.stages, num_warps=4,
    )  # fmt: skip


def _describe(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, width])


def _check(x: Tensor, x_scale: Tensor, w_SOI: Tensor, w_scale_SAB: Tensor) -> None:
    if x.dtype != FP8 or w_SOI.dtype != FP8:
        raise ValueError(f"expected FP8 E4M3 rows and weights; got {x.dtype} and {w_SOI.dtype}")
    check_shapes(x, w_SOI, BLOCK)
    slots, out_width, width = w_SOI.shape
    scales = (slots, triton.cdiv(out_width, BLOCK), width // BLOCK)
    if x_scale.shape != (*x.shape[:-1], width // BLOCK) or tuple(w_scale_SAB.shape) != scales:
        raise ValueError(
            f"scales of rows {tuple(x.shape)} and weights {tuple(w_SOI.shape)}: expected "
            f"{(*x.shape[:-1], width // BLOCK)} and {scales}, got {tuple(x_scale.shape)} and "
            f"{tuple(w_scale_SAB.shape)}"
        )
    if not w_scale_SAB.is_contiguous():
        raise ValueError("the weights' scales must be contiguous")


def check_shapes(x: Tensor, w_SOI: Tensor, multiple: int) -> None:
    if x.shape[-1] != w_SOI.shape[2] or x.shape[-1] % multiple:
        raise ValueError(
            f"rows are {x.shape[-1]} wide and weights {w_SOI.shape[2]}: expected the same "
            f"multiple of {multiple}"
        )
    if not (x.is_contiguous() and w_SOI.is_contiguous()):
        raise ValueError("rows and weights must be contiguous")


def check_counts(slots: int, w_SOI: Tensor, counts_S: Tensor) -> None:
    if w_SOI.shape[0] != slots or counts_S.shape != (slots,) or counts_S.dtype != torch.int32:
        raise ValueError(
            f"masked layout of {slots} slots: got weights of {w_SOI.shape[0]} slots and "
            f"counts {counts_S.dtype} {tuple(counts_S.shape)}, expected int32 ({slots},)"
        )


def _programs(x: Tensor) -> int:
    """Two a multiprocessor: one's epilogue hides behind the other's products."""
    return 2 * multiprocessors(x.device.index) if x.is_cuda else 4


def is_hopper(x: Tensor) -> bool:
    """Whether the kernels made for Hopper run on its device."""
    return x.is_cuda and not INTERPRET.value and torch.cuda.get_device_capability(x.device)[0] == 9


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
