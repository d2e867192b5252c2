# mypy: disable-error-code="no-untyped-def"
"""BF16 grouped GEMM for Hopper in Gluon, with SwiGLU in its epilogue where asked.

As `grouped_gemm_hopper`: persistent programs, a producer warp that streams blocks of the input
width and runs ahead into the next tile, two warpgroups of consumers. Here each consumer owns 64 of
a tile's 128 rows and all of its 256 weight rows, so that one may write its results while the other
multiplies. Gated, a tile has 128 weight rows of gate and the 128 of up that belong to them.
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

from crossdock.kernels.grouped_gemm_hopper import locate


@gluon.jit
def _producer(
    x_desc, w_desc, x_smem, w_smem, full, empty, p, sizes,
    GATED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.type.shape[0]
    out_width, width = sizes
    columns: gl.constexpr = 128 if GATED else 256
    tiles_o = gl.cdiv(out_width, columns)
    # Where the other 128 weight rows of a tile begin, and how many a slot has.
    second = 128
    height = out_width
    if GATED:
        second = out_width
        height = 2 * out_width
    step = 0
    tile = gl.program_id(0)
    slot, base, tile_m, tile_o = locate(
        tile, gl.to_tensor(0), gl.to_tensor(0), tiles_o, p, False, GROUP_M
    )
    while slot < p[2]:
        w_row = slot * height + tile_o * columns
        for block in range(width // 64):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 3 * 128 * 64 * 2)
            col = block * 64
            tma.async_copy_global_to_shared(x_desc, [tile_m * 128, col], ready, x_smem.index(stage))
            at = 2 * stage
            tma.async_copy_global_to_shared(w_desc, [w_row, col], ready, w_smem.index(at))
            tma.async_copy_global_to_shared(
                w_desc, [w_row + second, col], ready, w_smem.index(at + 1)
            )
            step += 1
        tile += gl.num_programs(0)
        slot, base, tile_m, tile_o = locate(tile, slot, base, tiles_o, p, False, GROUP_M)


@gluon.jit
def _store(value, out_desc, out_smem, row, col):
    tma.store_wait(pendings=0)  # of what was stored before: its memory is used again
    out_smem.store(value.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, col], out_smem)


@gluon.jit
def _consumer(
    out_desc, x_smem, w_smem, out_smem, full, empty, p, sizes, HALF: gl.constexpr,
    GATED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.type.shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    out_width, width = sizes
    columns: gl.constexpr = 128 if GATED else 256
    tiles_o = gl.cdiv(out_width, columns)
    step = 0
    tile = gl.program_id(0)
    slot, base, tile_m, tile_o = locate(
        tile, gl.to_tensor(0), gl.to_tensor(0), tiles_o, p, False, GROUP_M
    )
    out = out_smem.index(HALF)
    while slot < p[2]:
        first = gl.zeros([64, 128], gl.float32, mma)
        second = gl.zeros([64, 128], gl.float32, mma)
        for block in range(width // 64):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_smem.index(stage).slice(HALF * 64, 64)
            w = w_smem.index(2 * stage).permute((1, 0))
            first = warpgroup_mma(x, w, first, is_async=True)
            w = w_smem.index(2 * stage + 1).permute((1, 0))
            second = warpgroup_mma(x, w, second, is_async=True)
            # These two are under way; those of the block before are done with their stage.
            first, second = warpgroup_mma_wait(2, deps=(first, second))
            before = (step + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(before), count=1, pred=block > 0)
            step += 1
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        row = tile_m * 128 + HALF * 64
        if GATED:
            _store(first / (1.0 + gl.exp(-first)) * second, out_desc, out, row, tile_o * 128)
        else:
            _store(first, out_desc, out, row, tile_o * 256)
            _store(second, out_desc, out, row, tile_o * 256 + 128)
        tile += gl.num_programs(0)
        slot, base, tile_m, tile_o = locate(tile, slot, base, tiles_o, p, False, GROUP_M)
    tma.store_wait(pendings=0)


@gluon.jit
def hopper_bf16_kernel(
    x_desc,  # [N, I], blocks of [128, 64]
    w_desc,  # [S * O, I] or gated [S * 2F, I], blocks of [128, 64]
    out_desc,  # [N, O] or gated [N, F], blocks of [64, 128]
    tile_slots_ptr,
    offsets_ptr,
    slots,
    out_width,
    width,
    GATED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 128, 64], w_desc.layout)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    p = (tile_slots_ptr, offsets_ptr, slots)
    sizes = (out_width, width)
    gl.warp_specialize(
        [
            (
                _consumer,
                (out_desc, x_smem, w_smem, out_smem, full, empty, p, sizes, 0, GATED, GROUP_M),
            ),
            (
                _consumer,
                (out_desc, x_smem, w_smem, out_smem, full, empty, p, sizes, 1, GATED, GROUP_M),
            ),
            (_producer, (x_desc, w_desc, x_smem, w_smem, full, empty, p, sizes, GATED, GROUP_M)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
