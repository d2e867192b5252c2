# mypy: disable-error-code="no-untyped-def"
"""FP8 E4M3 with fp32 block scales: activations per 1x128 channels, weights per 128x128.

value = code * scale, scale = amax / 448 over the block. Letters beyond the shape legend: I and O
the input and output width of a product, B and A the number of blocks of 128 in I and O.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.rounding import BLOCK, E4M3_MAX, quantise_blocks, quantise_blocks_torch

FP8 = torch.float8_e4m3fn
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _quantise_rows_kernel(
    x_ptr, q_ptr, scale_ptr, rows, columns, width, stride_x,
    ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    block = tl.program_id(1)
    col = block * BLOCK_I + tl.arange(0, BLOCK_I)
    valid = (row < rows)[:, None]
    there = valid & (col < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + col[None, :], mask=there, other=0.0)
    q, scale = quantise_blocks(x.to(tl.float32), INTERPRET)
    tl.store(q_ptr + row[:, None] * width + col[None, :], q, mask=valid)
    tl.store(scale_ptr + row * (width // BLOCK_I) + block, scale, mask=row < rows)


def quantise_rows(x_NI: Tensor, align: int = 1) -> tuple[Tensor, Tensor]:
    """Activations: codes [N, I] and scales [N, I / 128]; x BF16 or fp32, rows may be strided.

    I is rounded up to a multiple of 128, with zeros, and N to one of `align`, with rows that stay
    unwritten. Its twin is `rounding.quantise_blocks_torch`.
    """
    rows, columns = x_NI.shape
    width, room = triton.cdiv(columns, BLOCK) * BLOCK, triton.cdiv(rows, align) * align
    q_NI = torch.empty((room, width), dtype=FP8, device=x_NI.device)
    scale_NB = torch.empty((room, width // BLOCK), dtype=torch.float32, device=x_NI.device)
    if rows:
        per_program = 16
        _quantise_rows_kernel[(triton.cdiv(rows, per_program), width // BLOCK)](
            x_NI, q_NI, scale_NB, rows, columns, width, x_NI.stride(0),
            ROWS=per_program, BLOCK_I=BLOCK,
        )  # fmt: skip
    return q_NI, scale_NB


def quantise_weights(w_SOI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights: codes [S, O, I] and scales [S, ceil(O / 128), I / 128]; done once, in torch.

    The last block of rows may be short (O not a multiple of 128).
    """
    slots, out, width = w_SOI.shape
    _check_width(width)
    q_SOI = torch.empty((slots, out, width), dtype=FP8, device=w_SOI.device)
    blocks = -(-out // BLOCK)
    scale_SAB = torch.empty((slots, blocks, width // BLOCK), device=w_SOI.device)
    for slot in range(slots):  # one slot at a time: fp32 copies of all weights would not fit
        w = torch.nn.functional.pad(w_SOI[slot].float(), (0, 0, 0, blocks * BLOCK - out))
        w_ARBC = w.view(blocks, BLOCK, width // BLOCK, BLOCK)
        scale_AB = w_ARBC.abs().amax((1, 3)).clamp_min(1e-10) / E4M3_MAX
        scaled = (w_ARBC / scale_AB[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
        q_SOI[slot] = scaled.view(blocks * BLOCK, width)[:out].to(FP8)
        scale_SAB[slot] = scale_AB
    return q_SOI, scale_SAB


def dequantise_rows(q_NI: Tensor, scale_NB: Tensor) -> Tensor:
    """fp32 [..., I] of codes [..., I] and scales [..., I / 128]."""
    return q_NI.float() * scale_NB.repeat_interleave(BLOCK, -1)


def dequantise_weights(q_SOI: Tensor, scale_SAB: Tensor) -> Tensor:
    """fp32 [S, O, I]."""
    rows = scale_SAB.repeat_interleave(BLOCK, -2)[..., : q_SOI.shape[-2], :]
    return q_SOI.float() * rows.repeat_interleave(BLOCK, -1)


@triton.jit
def _swiglu_rows(x_ptr, q_ptr, scale_ptr, row, valid, block, width, BLOCK_F: tl.constexpr):
    col = block * BLOCK_F + tl.arange(0, BLOCK_F)
    at = x_ptr + row[:, None] * (2 * width) + col[None, :]
    gate = tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=valid[:, None], other=0.0).to(tl.float32)
    q, scale = quantise_blocks(gate / (1.0 + tl.exp(-gate)) * up, INTERPRET)
    tl.store(q_ptr + row[:, None] * width + col[None, :], q, mask=valid[:, None])
    tl.store(scale_ptr + row * (width // BLOCK_F) + block, scale, mask=valid)


@triton.jit
def _swiglu_grouped_kernel(
    x_ptr, q_ptr, scale_ptr, end_ptr, width, ROWS: tl.constexpr, BLOCK_F: tl.constexpr
):
    end = tl.load(end_ptr)
    start = tl.program_id(1) * ROWS
    while start < end:
        row = start + tl.arange(0, ROWS).to(tl.int64)
        _swiglu_rows(x_ptr, q_ptr, scale_ptr, row, row < end, tl.program_id(0), width, BLOCK_F)
        start += tl.num_programs(1) * ROWS


@triton.jit
def _swiglu_masked_kernel(
    x_ptr, q_ptr, scale_ptr, counts_ptr, capacity, width, ROWS: tl.constexpr, BLOCK_F: tl.constexpr
):
    slot = tl.program_id(1)
    count = tl.load(counts_ptr + slot)
    start = 0
    while start < count:
        in_slot = start + tl.arange(0, ROWS)
        row = slot.to(tl.int64) * capacity + in_slot
        _swiglu_rows(
            x_ptr, q_ptr, scale_ptr, row, in_slot < count, tl.program_id(0), width, BLOCK_F
        )
        start += ROWS


def swiglu_quantise(x_N2F: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up and its quantisation in one pass, grouped layout.

    x_N2F: contiguous [N, 2F], gate first. end: int32 [1] on the device, rows in use; the rows
    from there on are left unwritten. Returns codes [N, F] and scales [N, F / 128].
    """
    rows, width = x_N2F.shape[0], x_N2F.shape[1] // 2
    _check_width(width)
    q_NF = torch.empty((rows, width), dtype=FP8, device=x_N2F.device)
    scale_NB = torch.empty((rows, width // BLOCK), dtype=torch.float32, device=x_N2F.device)
    if rows:
        # Grid-stride: most of a worst-case buffer is unused, and `end` is known on the device only.
        row_programs = min(triton.cdiv(rows, 16), 512)
        _swiglu_grouped_kernel[(width // BLOCK, row_programs)](
            x_N2F, q_NF, scale_NB, end, width, ROWS=16, BLOCK_F=BLOCK
        )
    return q_NF, scale_NB


def swiglu_quantise_masked(x_SC2F: Tensor, counts_S: Tensor) -> tuple[Tensor, Tensor]:
    """As `swiglu_quantise` for [S, C, 2F] with counts_S int32 on the device."""
    slots, capacity, width = x_SC2F.shape[0], x_SC2F.shape[1], x_SC2F.shape[2] // 2
    _check_width(width)
    device = x_SC2F.device
    q_SCF = torch.empty((slots, capacity, width), dtype=FP8, device=device)
    scale_SCB = torch.empty((slots, capacity, width // BLOCK), dtype=torch.float32, device=device)
    if slots and capacity:
        _swiglu_masked_kernel[(width // BLOCK, slots)](
            x_SC2F, q_SCF, scale_SCB, counts_S, capacity, width, ROWS=16, BLOCK_F=BLOCK
        )
    return q_SCF, scale_SCB


def swiglu_quantise_twin(x_N2F: Tensor) -> tuple[Tensor, Tensor]:
    """All rows, both layouts (leading dimensions are kept)."""
    gate, up = x_N2F.float().chunk(2, -1)
    y = gate * torch.sigmoid(gate) * up
    return quantise_blocks_torch(y)


def _check_width(width: int) -> None:
    if width % BLOCK:
        raise ValueError(f"FP8 block scales need a width that is a multiple of 128; got {width}")
