# mypy: disable-error-code="no-untyped-def"
"""Absorbed MLA decoding for Hopper in Gluon: a producer warp, one or two warpgroups of consumers.

In the portable kernel the warps that compute also issue the copies, and stall while these queue up.
Here one warp streams tiles of 64 keys through shared memory: a bulk copy (TMA) per page and 64
columns. Few heads: one consumer, products transposed, bound by memory. 64 heads a program: two
consumers, each owns half of the value columns; both compute all scores, which costs half as many
operations again but leaves them independent, so that one's softmax hides behind the other's
products. Tiles of an E4M3 cache come from `attention_mla_codes.converter`.
Compiled only: the kernels of `attention_mla` run everywhere.
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

from crossdock.kernels.attention_mla_codes import converter

KEYS = 64
_KEYS = gl.constexpr(KEYS)
_LIFT = gl.constexpr(12.0)
"""Of the exponents of weights that become FP16, over an E4M3 cache: the largest times a latent's
scale stays in range up to latents of 7,000, which their norm does not leave."""


@gluon.jit
def _rows(table_ptr, n, end, PAGE: gl.constexpr, BOX: gl.constexpr):
    """First slot of each piece of the tile at key n."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pos = n + gl.arange(0, _KEYS // BOX, lanes) * BOX
    page = gl.load(table_ptr + pos // PAGE, mask=pos < end, other=0).to(gl.int32)
    return page * PAGE + pos % PAGE


@gluon.jit
def _producer(
    desc, table_ptr, keys, barriers, span, PAGE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    kv, rope, _ = keys
    full, empty = barriers
    STAGES: gl.constexpr = kv.type.shape[0]
    L: gl.constexpr = kv.type.shape[2]
    PIECES: gl.constexpr = _KEYS // BOX
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    start, end = span
    piece = gl.arange(0, PIECES, lanes)
    rows = _rows(table_ptr, start, end, PAGE, BOX)
    for n in range(start, end, _KEYS):
        following = _rows(table_ptr, n + _KEYS, end, PAGE, BOX)
        step = (n - start) // _KEYS
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, _KEYS * (L + 64) * 2)
        # Shared memory holds 64 columns of all keys, then the next 64.
        kv_parts = kv.index(stage)._reinterpret(
            gl.bfloat16, [L // 64 * PIECES, BOX, 64], desc.layout
        )
        rope_parts = rope.index(stage)._reinterpret(gl.bfloat16, [PIECES, BOX, 64], desc.layout)
        for i in gl.static_range(PIECES):
            row = gl.sum(gl.where(piece == i, rows, 0), axis=0)
            for c in gl.static_range(L // 64):
                tma.async_copy_global_to_shared(
                    desc, [row, c * 64], ready, kv_parts.index(c * PIECES + i)
                )
            tma.async_copy_global_to_shared(desc, [row, L], ready, rope_parts.index(i))
        rows = following


@gluon.jit
def _narrow(
    queries, keys, p_smem, barriers, span, out, scale, M: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    q, q_rope = queries
    kv, rope, unit = keys
    full, empty = barriers
    STAGES: gl.constexpr = kv.type.shape[0]
    L: gl.constexpr = kv.type.shape[2]
    LIFT: gl.constexpr = _LIFT if SCALED else 0.0
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    part_ptr, lse_ptr, row, heads, first_head, live = out
    start, end = span
    best = gl.full([M], -1e30, gl.float32, gl.SliceLayout(0, mma))
    sums = gl.zeros([_KEYS, M], gl.float32, mma)  # of the warps' own keys, summed up at the end
    acc = gl.zeros([L, M], gl.float32, mma)
    zero = gl.zeros([_KEYS, M], gl.float32, mma)
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, mma))
    for n in range(start, end, _KEYS):
        step = (n - start) // _KEYS
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        tile = kv.index(stage)
        s = warpgroup_mma(tile, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(rope.index(stage), q_rope.permute((1, 0)), s, is_async=True)
        if SCALED:
            latent_scale = unit.index(stage).load(gl.SliceLayout(1, mma))
            s = warpgroup_mma_wait(0, deps=(s,)) * (latent_scale * scale)[:, None]
        else:
            s = warpgroup_mma_wait(0, deps=(s,)) * scale
        s = gl.where((n + key < end)[:, None], s, -1e30)
        higher = gl.maximum(best, gl.max(s, axis=0))
        p = gl.exp2(s - (higher - LIFT)[None, :])
        shrink = gl.exp2(best - higher)
        sums = sums * shrink[None, :] + p
        best = higher
        if SCALED:
            p = p * latent_scale[:, None]
        p_smem.store(p.to(p_smem.dtype))
        fence_async_shared()
        acc = acc * shrink[None, :]
        acc = warpgroup_mma(tile.permute((1, 0)), p_smem, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
    total = gl.sum(sums, axis=0)
    h = first_head + gl.arange(0, M, gl.SliceLayout(0, mma))
    i = gl.arange(0, L, gl.SliceLayout(1, mma))
    at = part_ptr + (row * heads + h)[None, :] * L + i[:, None]
    mask = (h < heads) & (live > 0)
    gl.store(at, acc / total[None, :], mask=mask[None, :])
    gl.store(lse_ptr + row * heads + h, best - LIFT + gl.log2(total), mask=mask)


@gluon.jit
def _wide(
    queries, keys, barriers, span, out, scale, HALF: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    q, q_rope = queries
    kv, rope, unit = keys
    full, empty = barriers
    STAGES: gl.constexpr = kv.type.shape[0]
    L: gl.constexpr = kv.type.shape[2]
    WIDTH: gl.constexpr = L // 2
    LIFT: gl.constexpr = _LIFT if SCALED else 0.0
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, mma)
    part_ptr, lse_ptr, row, heads, first_head, live = out
    start, end = span
    best = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_mma))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_mma))
    acc = gl.zeros([64, WIDTH], gl.float32, mma)
    zero = gl.zeros([64, _KEYS], gl.float32, s_mma)
    key = gl.arange(0, _KEYS, gl.SliceLayout(0, s_mma))
    for n in range(start, end, _KEYS):
        step = (n - start) // _KEYS
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        tile = kv.index(stage)
        s = warpgroup_mma(q, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if SCALED:
            latent_scale = unit.index(stage).load(gl.SliceLayout(0, s_mma))
            s = s * (latent_scale * scale)[None, :]
        else:
            s = s * scale
        s = gl.where((n + key < end)[None, :], s, -1e30)
        higher = gl.maximum(best, gl.max(s, axis=1))
        p = gl.exp2(s - (higher - LIFT)[:, None])
        shrink = gl.exp2(best - higher)
        total = total * shrink + gl.sum(p, axis=1)
        best = higher
        acc = acc * gl.convert_layout(shrink, by_head)[:, None]
        if SCALED:
            p = p * latent_scale[None, :]
        p_op = gl.convert_layout(p.to(kv.dtype), gl.DotOperandLayout(0, mma, 2))
        acc = warpgroup_mma(p_op, tile.slice(HALF * WIDTH, WIDTH, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
    h = first_head + gl.arange(0, 64, by_head)
    i = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, mma))
    at = part_ptr + (row * heads + h)[:, None] * L + i[None, :]
    sums = gl.convert_layout(total, by_head)
    mask = (h < heads) & (live > 0)
    gl.store(at, acc / sums[:, None], mask=mask[:, None])
    if HALF == 0:
        lse = gl.convert_layout(best - LIFT + gl.log2(total), by_head)
        gl.store(lse_ptr + row * heads + h, lse, mask=mask)


@gluon.jit
def _load_queries(q_ptr, smem, head, heads, stride_h, M: gl.constexpr, WIDTH: gl.constexpr,
                  LANES: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    h = head + gl.arange(0, M, gl.SliceLayout(1, layout))
    i = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = q_ptr + h[:, None] * stride_h + i[None, :]
    q = gl.load(at, mask=(h < heads)[:, None], other=0.0)
    if smem.dtype == gl.float16:
        q = gl.minimum(gl.maximum(q.to(gl.float32), -65504.0), 65504.0).to(gl.float16)
    smem.store(q)


@gluon.jit(
    do_not_specialize=["sequences", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr"],
)
def hopper_kernel(
    cache, scale_ptr, q_ptr, q_rope_ptr, table_ptr, lens_ptr, first_ptr, seq_ptr, chunk_ptr,
    part_ptr, lse_ptr, sequences, scale, heads, stride_qb, stride_qh, stride_rb, stride_rh,
    stride_table, M: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """As `attention_mla._decode_kernel`; M 64 is the wide form. cache: blocks [BOX, 64], BOX =
    min(PAGE, 64); SCALED: a pointer to codes, four a word."""
    tiles: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    w = gl.program_id(1)
    live = (w < gl.load(first_ptr + sequences)).to(gl.int32)
    b = gl.load(seq_ptr + w, mask=live > 0, other=0).to(gl.int64)
    chunk = gl.load(chunk_ptr)
    start = (w - gl.load(first_ptr + b)) * chunk
    end = gl.minimum(start + chunk, gl.load(lens_ptr + b).to(gl.int32))
    # A program without an item goes through the motions with no keys.
    end = gl.where(live > 0, end, start)
    head = gl.program_id(0) * M
    dtype: gl.constexpr = gl.float16 if SCALED else gl.bfloat16
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit = gl.allocate_shared_memory(gl.float32, [STAGES, _KEYS], line)
    kv = gl.allocate_shared_memory(dtype, [STAGES, _KEYS, L], tiles)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, 64], tiles)
    q = gl.allocate_shared_memory(dtype, [M, L], tiles)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [M, 64], tiles)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if M == 64 else 1)
    _load_queries(q_ptr + b * stride_qb, q, head, heads, stride_qh, M, L, 32)
    _load_queries(q_rope_ptr + b * stride_rb, q_rope, head, heads, stride_rh, M, 64, 8)
    fence_async_shared()
    span = (start, end)
    out = (part_ptr, lse_ptr, w.to(gl.int64), heads, head, live)
    table = table_ptr + b * stride_table
    queries, keys, barriers = (q, q_rope), (kv, rope, unit), (full, empty)
    if M == 64:
        if SCALED:
            gl.warp_specialize(
                [
                    (converter, (cache, scale_ptr, table, keys, barriers, span, PAGE, 16, 1, 4)),
                    (_wide, (queries, keys, barriers, span, out, scale, 0, SCALED)),
                    (_wide, (queries, keys, barriers, span, out, scale, 1, SCALED)),
                ],
                [4, 4],
                [208, 208],
            )
        else:
            gl.warp_specialize(
                [
                    (_wide, (queries, keys, barriers, span, out, scale, 0, SCALED)),
                    (_wide, (queries, keys, barriers, span, out, scale, 1, SCALED)),
                    (_producer, (cache, table, keys, barriers, span, PAGE, BOX)),
                ],
                [4, 1],
                [232, 40],
            )
    else:
        p_layout: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=2 * M, element_bitwidth=16, rank=2
        )
        p = gl.allocate_shared_memory(dtype, [_KEYS, M], p_layout)
        if SCALED:
            WARPS: gl.constexpr = 8 if M == 16 else 4
            REGISTERS: gl.constexpr = 152 if M == 16 else 216
            gl.warp_specialize(
                [
                    (_narrow, (queries, keys, p, barriers, span, out, scale, M, SCALED)),
                    (
                        converter,
                        (cache, scale_ptr, table, keys, barriers, span, PAGE, 32, 2, WARPS),
                    ),
                ],
                [WARPS],
                [REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_narrow, (queries, keys, p, barriers, span, out, scale, M, SCALED)),
                    (_producer, (cache, table, keys, barriers, span, PAGE, BOX)),
                ],
                [1],
                [40],
            )
