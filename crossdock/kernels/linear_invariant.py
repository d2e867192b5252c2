# mypy: disable-error-code="no-untyped-def"
"""Matrix products whose rows depend on nothing but themselves and the weight, for invariant mode.

One tile shape whatever the number of rows, the inner dimension summed from front to back in fp32 by
one program: where a row lies, and what lies beside it, changes no bit. A library chooses kernels,
and so the order of its sums, by the number of rows. The compiler must not choose either: it makes
other code for numbers that are 1 or divide by 16, so counts of rows are hidden from that, and rows
always begin on 16 bytes.

Float32 is exact float32, not TF32. What CPUs do instead is in `layers.linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.attention_split import as_operand
from crossdock.kernels.quant import INTERPRET
from crossdock.kernels.rounding import cast_rows


@dataclass(frozen=True)
class ProductTile:
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


TILE_16, TILE_32 = ProductTile(64, 64, 128, 4, 3), ProductTile(32, 64, 32, 4, 2)
"""By the bits of an element; whatever else changes, these must not depend on the rows."""


@triton.jit
def _product(
    x_ptr, w_ptr, valid_m, valid_n, K, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]. x_ptr [BM, 1], w_ptr [1, BN]: where rows and columns begin."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = k < K
        at = x_ptr + k[None, :]
        x = tl.load(at, mask=valid_m[:, None] & inside[None, :], other=0.0)
        at = w_ptr + k[:, None].to(tl.int64) * stride_wk
        w = tl.load(at, mask=inside[:, None] & valid_n[None, :], other=0.0)
        acc = tl.dot(as_operand(x, dtype), as_operand(w, dtype), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, rows, N, K, groups, stride_wg, stride_wn, stride_wk,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows [rows, groups, K] through weights [groups, N, K] to [rows, groups, N]."""
    tiles = tl.cdiv(rows, BM)
    g = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    row = m.to(tl.int64) * groups + g
    w_ptr += g * stride_wg + n[None, :].to(tl.int64) * stride_wn
    acc = _product(x_ptr + row[:, None] * K, w_ptr, m < rows, n < N, K, stride_wk, BM, BN, BK)
    if BIAS:
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row[:, None] * N + n[None, :]
    out = cast_rows(acc, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(at, out, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _grouped_kernel(
    x_ptr, w_ptr, out_ptr, ends_ptr, tile_ends_ptr, N, K, slots, stride_ws,
    BLOCK_S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of all slots' tiles of rows, tile j of the columns."""
    t = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    tile_ends = tl.load(tile_ends_ptr + s, mask=s < slots, other=1 << 30).to(tl.int32)
    slot = tl.sum((tile_ends <= t).to(tl.int32), axis=0)
    if slot < slots:
        before = slot - 1
        first_tile = tl.load(tile_ends_ptr + before, mask=slot > 0, other=0).to(tl.int32)
        start = tl.load(ends_ptr + before, mask=slot > 0, other=0).to(tl.int32)
        end = tl.load(ends_ptr + slot).to(tl.int32)
        m = start + (t - first_tile) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        row = m.to(tl.int64)[:, None]
        column_ptr = w_ptr + slot.to(tl.int64) * stride_ws + n[None, :].to(tl.int64) * K
        acc = _product(x_ptr + row * K, column_ptr, m < end, n < N, K, 1, BM, BN, BK)
        out = cast_rows(acc, out_ptr.dtype.element_ty, INTERPRET)
        tl.store(out_ptr + row * N + n[None, :], out, mask=(m < end)[:, None] & (n < N)[None, :])


def tile_of(dtype: torch.dtype) -> ProductTile:
    return TILE_32 if dtype == torch.float32 else TILE_16


def aligned(x: Tensor) -> Tensor:
    """Contiguous, beginning on 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def linear_invariant(
    x_TK: Tensor,
    w_NK: Tensor,
    b_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, N] in `out_dtype`, x's by default; the bias is added in fp32.

    Raises:
        ValueError: widths or dtypes that differ.
    """
    _check(x_TK, w_NK, w_NK.shape[1])
    out_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0], dtype=out_dtype)
    _launch(aligned(x_TK), w_NK[None], b_N, out_TN)
    return out_TN


def batch_matmul_invariant(x_GTK: Tensor, w_GKN: Tensor) -> Tensor:
    """[G, T, N], of any strides; T tokens through G matrices. Raises as `linear_invariant`."""
    _check(x_GTK, w_GKN, w_GKN.shape[1])
    x_TGK = aligned(x_GTK.transpose(0, 1))
    out_TGN = x_GTK.new_empty(x_TGK.shape[0], w_GKN.shape[0], w_GKN.shape[2])
    _launch(x_TGK, w_GKN.transpose(1, 2), None, out_TGN)
    return out_TGN.transpose(0, 1)


def _launch(x: Tensor, w_GNK: Tensor, b_N: Tensor | None, out: Tensor) -> None:
    (groups, N, K), rows, tile = w_GNK.shape, x.shape[0], tile_of(x.dtype)
    if not rows:
        return
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(N, tile.columns), groups)
    _linear_kernel[grid](
        x, w_GNK, w_GNK if b_N is None else b_N, out, rows, N, K, groups, *w_GNK.stride(),
        BIAS=b_N is not None, BM=tile.rows, BN=tile.columns, BK=tile.inner,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def tile_ends(ends_S: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 [S]: how many tiles of rows the slots up to each have. ends_S: where their rows end."""
    rows, start = tile_of(dtype).rows, ends_S.new_zeros(1)
    counts_S = ends_S.diff(prepend=start)
    return torch.div(counts_S + (rows - 1), rows, rounding_mode="floor").cumsum(0)


def grouped_linear_invariant(
    x_MK: Tensor, w_SNK: Tensor, ends_S: Tensor, tile_ends_S: Tensor
) -> Tensor:
    """[M, N]: rows sorted by slot, each through its slot's weight, in one launch.

    Args:
        w_SNK: contiguous.
        ends_S: int, where the rows of each slot end, the last of them M; on the device.
        tile_ends_S: `tile_ends(ends_S, x.dtype)`.

    Raises:
        ValueError: widths or dtypes that differ.
    """
    _check(x_MK, w_SNK, w_SNK.shape[2])
    (M, K), (S, N, _), tile = x_MK.shape, w_SNK.shape, tile_of(x_MK.dtype)
    out_MN = x_MK.new_empty(M, N)
    if M:
        _grouped_kernel[(M // tile.rows + S, triton.cdiv(N, tile.columns))](
            aligned(x_MK), w_SNK, out_MN, ends_S, tile_ends_S, N, K, S, w_SNK.stride(0),
            BLOCK_S=triton.next_power_of_2(S), BM=tile.rows, BN=tile.columns, BK=tile.inner,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_MN


def _check(x: Tensor, w: Tensor, width: int) -> None:
    if x.shape[-1] != width or x.dtype != w.dtype:
        raise ValueError(
            f"rows of {x.shape[-1]} {x.dtype} do not go through a weight of {width} {w.dtype}"
        )
