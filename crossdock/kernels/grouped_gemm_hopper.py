# mypy: disable-error-code="no-untyped-def"
"""FP8 grouped GEMM for Hopper in Gluon: a producer warp and two warpgroups of consumers.

A persistent program keeps a tile of 128 rows x 256 outputs. The producer
streams blocks of 128 of the input width through shared memory (TMA, mbarriers) and runs ahead into
the next tile; each consumer owns 128 outputs and promotes 64 rows while the other one keeps the
tensor cores busy. Two warpgroups of their own do what a program of eight warps cannot: they wait
for data, not for each other. Compiled only: the kernels of `grouped_gemm_triton` run everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def locate(tile, slot, base, tiles_o, p, MASKED: gl.constexpr, GROUP_M: gl.constexpr):
    """(slot, base, row tile, column tile) of a tile; slot = number of slots past the last one.

    Masked: slot and base (first tile of the slot) move on from those of the previous tile.
    """
    index_ptr, offsets_ptr, slots = p
    if MASKED:
        tiles_m = gl.cdiv(gl.load(index_ptr + slot, mask=slot < slots, other=0), 128)
        while (slot < slots) & (tile >= base + tiles_m * tiles_o):
            base += tiles_m * tiles_o
            slot += 1
            tiles_m = gl.cdiv(gl.load(index_ptr + slot, mask=slot < slots, other=0), 128)
    else:
        tiles_m = gl.load(offsets_ptr + slots) // 128
    local = tile - base
    first_m = local // (GROUP_M * tiles_o) * GROUP_M
    height = gl.maximum(gl.minimum(tiles_m - first_m, GROUP_M), 1)
    in_group = local - first_m * tiles_o
    tile_m = first_m + in_group % height
    if not MASKED:
        slot = gl.load(index_ptr + tile_m, mask=tile < tiles_m * tiles_o, other=slots)
    return slot, base, tile_m, in_group // height


@gluon.jit
def _producer(
    x_desc, w_desc, x_smem, w_smem, full, empty, p, sizes,
    MASKED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.type.shape[0]
    capacity, out_width, width, _, _ = sizes
    tiles_o = gl.cdiv(out_width, 256)
    step = 0
    tile = gl.program_id(0)
    slot, base, tile_m, tile_o = locate(
        tile, gl.to_tensor(0), gl.to_tensor(0), tiles_o, p, MASKED, GROUP_M
    )
    while slot < p[2]:
        row = tile_m * 128
        if MASKED:
            row += slot * capacity
        w_row = slot * out_width + tile_o * 256
        for block in range(width // 128):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 3 * 128 * 128)
            tma.async_copy_global_to_shared(x_desc, [row, block * 128], ready, x_smem.index(stage))
            at = 2 * stage
            tma.async_copy_global_to_shared(w_desc, [w_row, block * 128], ready, w_smem.index(at))
            tma.async_copy_global_to_shared(
                w_desc, [w_row + 128, block * 128], ready, w_smem.index(at + 1)
            )
            step += 1
        tile += gl.num_programs(0)
        slot, base, tile_m, tile_o = locate(tile, slot, base, tiles_o, p, MASKED, GROUP_M)


@gluon.jit
def _store_half(acc, out_ptr, first_row, rows_left, col, out_width):
    # By way of shared memory, to write whole lines of a row.
    layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
    out = gl.convert_layout(acc.to(gl.bfloat16), layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = out_ptr + (first_row + rows.to(gl.int64))[:, None] * out_width + cols[None, :]
    gl.store(at, out, mask=(rows < rows_left)[:, None] & (cols < out_width)[None, :])


@gluon.jit
def _consumer(
    x_scale_ptr, w_scale_ptr, out_ptr, x_smem, w_smem, full, empty, p, sizes, HALF: gl.constexpr,
    MASKED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.type.shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    capacity, out_width, width, stride_n, stride_b = sizes
    tiles_o = gl.cdiv(out_width, 256)
    blocks = width // 128
    step = 0
    tile = gl.program_id(0)
    slot, base, tile_m, tile_o = locate(
        tile, gl.to_tensor(0), gl.to_tensor(0), tiles_o, p, MASKED, GROUP_M
    )
    zero = gl.zeros([64, 128], gl.float32, mma)
    while slot < p[2]:
        in_slot = tile_m * 128
        first_row = in_slot.to(gl.int64)
        rows_left = 128
        if MASKED:
            first_row += slot.to(gl.int64) * capacity
            rows_left = gl.load(p[0] + slot) - in_slot
        rows = gl.arange(0, 64, gl.SliceLayout(1, mma))
        # Rows beyond the count may lie beyond the tensor: they read the tile's first scale.
        lo_ptr = x_scale_ptr + (first_row + gl.where(rows < rows_left, rows, 0)) * stride_n
        hi = gl.where(rows + 64 < rows_left, rows + 64, 0)
        hi_ptr = x_scale_ptr + (first_row + hi) * stride_n
        # The last block of outputs may be missing: its columns are not stored.
        at_o = gl.minimum(tile_o * 2 + HALF, gl.cdiv(out_width, 128) - 1)
        w_at = w_scale_ptr + (slot.to(gl.int64) * gl.cdiv(out_width, 128) + at_o) * blocks
        acc_lo = zero
        acc_hi = zero
        w_scale = gl.load(w_at)
        scale_lo = gl.load(lo_ptr)
        scale_hi = gl.load(hi_ptr)
        for block in range(blocks):
            # The next block's scales are on their way while this one is multiplied.
            following = gl.minimum(block + 1, blocks - 1)
            w_next = gl.load(w_at + following)
            next_lo = gl.load(lo_ptr + following * stride_b)
            next_hi = gl.load(hi_ptr + following * stride_b)
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_smem.index(stage)
            w = w_smem.index(2 * stage + HALF).permute((1, 0))
            d = warpgroup_mma(x.slice(0, 64), w, zero, use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=(d,))
            acc_lo += d * (scale_lo * w_scale)[:, None]
            d = warpgroup_mma(x.slice(64, 64), w, zero, use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=(d,))
            acc_hi += d * (scale_hi * w_scale)[:, None]
            mbarrier.arrive(empty.index(stage), count=1)
            w_scale = w_next
            scale_lo = next_lo
            scale_hi = next_hi
            step += 1
        col = tile_o * 256 + HALF * 128
        _store_half(acc_lo, out_ptr, first_row, rows_left, col, out_width)
        _store_half(acc_hi, out_ptr, first_row + 64, rows_left - 64, col, out_width)
        tile += gl.num_programs(0)
        slot, base, tile_m, tile_o = locate(tile, slot, base, tiles_o, p, MASKED, GROUP_M)


@gluon.jit
def hopper_kernel(
    x_desc,
    x_scale_ptr,
    w_desc,
    w_scale_ptr,
    out_ptr,
    index_ptr,  # slots of row tiles, or counts when MASKED
    offsets_ptr,
    slots,
    capacity,
    out_width,
    width,
    stride_n,
    stride_b,
    MASKED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    p = (index_ptr, offsets_ptr, slots)
    sizes = (capacity, out_width, width, stride_n, stride_b)
    gl.warp_specialize(
        [
            (
                _consumer,
                (x_scale_ptr, w_scale_ptr, out_ptr, x_smem, w_smem, full, empty, p, sizes, 0,
                 MASKED, GROUP_M),
            ),
            (
                _consumer,
                (x_scale_ptr, w_scale_ptr, out_ptr, x_smem, w_smem, full, empty, p, sizes, 1,
                 MASKED, GROUP_M),
            ),
            (_producer, (x_desc, w_desc, x_smem, w_smem, full, empty, p, sizes, MASKED, GROUP_M)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
