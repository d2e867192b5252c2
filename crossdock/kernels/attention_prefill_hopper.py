# mypy: disable-error-code="no-untyped-def"
"""Prefill attention for Hopper in Gluon: a producer warp and two warpgroups of 64 query rows each.

The producer streams tiles of keys and values through shared memory with bulk copies (TMA), one per
page (or 64 rows where keys lie one after another) and 64 columns; a consumer's softmax hides behind
the other's products (FlashAttention-3, arXiv 2407.08608, section 3.1, without its barriers that
make the two take turns). Compiled only: the kernels of `attention_prefill` run everywhere.
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

KEYS = 128
_KEYS = gl.constexpr(KEYS)


@gluon.jit
def _rows(table_ptr, base, n, end, PAGE: gl.constexpr, BOX: gl.constexpr):
    """First row of each piece of the tile at key n. PAGE 0: they lie one after another."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pos = n + gl.arange(0, _KEYS // BOX, lanes) * BOX
    if PAGE == 0:
        return base + pos
    else:
        page = gl.load(table_ptr + pos // PAGE, mask=pos < end, other=0).to(gl.int32)
        return page * PAGE + pos % PAGE


@gluon.jit
def _copy(desc, row, column, ready, smem, i, BOX: gl.constexpr):
    """A piece of all columns; shared memory holds 64 of them for all keys, then the next 64."""
    CHUNKS: gl.constexpr = smem.type.shape[1] // 64
    PIECES: gl.constexpr = _KEYS // BOX
    parts = smem._reinterpret(gl.bfloat16, [CHUNKS * PIECES, BOX, 64], desc.layout)
    for c in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(
            desc, [row, column + c * 64], ready, parts.index(c * PIECES + i)
        )


@gluon.jit
def _producer(
    k_desc, v_desc, r_desc, table_ptr, base, columns, k, v, rope, k_full, v_full, empty, span,
    PAGE: gl.constexpr, BOX: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k.type.shape[0]
    PIECES: gl.constexpr = _KEYS // BOX
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    k_column, v_column = columns
    start, end = span
    piece = gl.arange(0, PIECES, lanes)
    rows = _rows(table_ptr, base, start, end, PAGE, BOX)
    for n in range(start, end, _KEYS):
        following = _rows(table_ptr, base, n + _KEYS, end, PAGE, BOX)
        step = (n - start) // _KEYS
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
        ready = k_full.index(stage)
        mbarrier.expect(ready, _KEYS * (k.type.shape[2] + R) * 2)
        for i in gl.static_range(PIECES):
            row = gl.sum(gl.where(piece == i, rows, 0), axis=0)
            _copy(k_desc, row, k_column, ready, k.index(stage), i, BOX)
            if R > 0:
                _copy(r_desc, row, 0, ready, rope.index(stage), i, BOX)
        ready = v_full.index(stage)
        mbarrier.expect(ready, _KEYS * v.type.shape[2] * 2)
        for i in gl.static_range(PIECES):
            row = gl.sum(gl.where(piece == i, rows, 0), axis=0)
            _copy(v_desc, row, v_column, ready, v.index(stage), i, BOX)
        rows = following


@gluon.jit
def _consumer(
    q, q_rope, k, v, rope, k_full, v_full, empty, span, tile, out_ptr, strides, scale,
    WHO: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k.type.shape[0]
    V: gl.constexpr = v.type.shape[2]
    TOKENS: gl.constexpr = 128 // GROUP
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    start, end = span
    first_token, queries, before, first_row, first_head = tile
    row = WHO * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_mma))
    pos_q = before + first_token + row // GROUP
    best = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_mma))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_mma))
    acc = gl.zeros([64, V], gl.float32, mma)
    zero = gl.zeros([64, _KEYS], gl.float32, s_mma)
    key = gl.arange(0, _KEYS, gl.SliceLayout(0, s_mma))
    mine = q.slice(WHO * 64, 64)
    for n in range(start, end, _KEYS):
        step = (n - start) // _KEYS
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), step // STAGES & 1)
        s = warpgroup_mma(mine, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if R > 0:
            my_rope = q_rope.slice(WHO * 64, 64)
            s = warpgroup_mma(my_rope, rope.index(stage).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,)) * scale
        if n + _KEYS > before + first_token:
            s = gl.where((n + key)[None, :] <= pos_q[:, None], s, -1e30)
        higher = gl.maximum(best, gl.max(s, axis=1))
        p = gl.exp2(s - higher[:, None])
        shrink = gl.exp2(best - higher)
        total = total * shrink + gl.sum(p, axis=1)
        best = higher
        acc = acc * gl.convert_layout(shrink, by_row)[:, None]
        p_op = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, mma, 2))
        mbarrier.wait(v_full.index(stage), step // STAGES & 1)
        acc = warpgroup_mma(p_op, v.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
    stride_t, stride_h = strides
    row = WHO * 64 + gl.arange(0, 64, by_row)
    token = first_token + row // GROUP
    mask = (row < TOKENS * GROUP) & (token < queries)
    at = (first_row + token).to(gl.int64) * stride_t + (first_head + row % GROUP) * stride_h
    i = gl.arange(0, V, gl.SliceLayout(0, mma))
    sums = gl.convert_layout(total, by_row)
    out = (acc / sums[:, None]).to(gl.bfloat16)
    gl.store(out_ptr + at[:, None] + i[None, :], out, mask=mask[:, None])


@gluon.jit
def _load_queries(q_ptr, smem, tile, stride_t, stride_h, GROUP: gl.constexpr, LANES: gl.constexpr):
    WIDTH: gl.constexpr = smem.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    first_token, queries, _, first_row, first_head = tile
    row = gl.arange(0, 128, gl.SliceLayout(1, layout))
    token = first_token + row // GROUP
    mask = (row < 128 // GROUP * GROUP) & (token < queries)
    at = (first_row + token).to(gl.int64) * stride_t + (first_head + row % GROUP) * stride_h
    i = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    smem.store(gl.load(q_ptr + at[:, None] + i[None, :], mask=mask[:, None], other=0.0))


@gluon.jit(
    do_not_specialize=["sequences", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "cu_q_ptr", "cu_k_ptr", "lens_ptr"],
)
def hopper_kernel(
    k_desc, v_desc, r_desc, q_ptr, q_rope_ptr, out_ptr, table_ptr, cu_q_ptr, cu_k_ptr, lens_ptr,
    first_ptr, seq_ptr, sequences, scale, stride_qt, stride_qh, stride_rt, stride_rh, stride_ot,
    stride_oh, stride_table, stride_kh, stride_vh, D: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As `attention_prefill._prefill_kernel`, tiles of 128 rows. Descriptors: blocks [BOX, 64]."""
    g = gl.program_id(0)
    items = gl.load(first_ptr + sequences)
    # The last tiles of a sequence see most keys: they start first.
    w = items - 1 - gl.program_id(1)
    live = w >= 0
    w = gl.maximum(w, 0)
    b = gl.load(seq_ptr + w).to(gl.int64)
    first_row = gl.load(cu_q_ptr + b).to(gl.int32)
    queries = gl.load(cu_q_ptr + b + 1).to(gl.int32) - first_row
    length = gl.load(lens_ptr + b).to(gl.int32)
    first_token = (w - gl.load(first_ptr + b)) * (128 // GROUP)
    queries = gl.where(live, queries, 0)  # such a program computes and stores nothing
    before = length - queries
    end = gl.minimum(before + first_token + 128 // GROUP, length)
    end = gl.where(live, end, 0)
    tile = (first_token, queries, before, first_row, g * GROUP)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, D], shared)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, V], shared)
    q = gl.allocate_shared_memory(gl.bfloat16, [128, D], shared)
    rope = k
    q_rope = q
    if R > 0:
        rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, R], shared)
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [128, R], shared)
        _load_queries(q_rope_ptr, q_rope, tile, stride_rt, stride_rh, GROUP, R // 8)
    _load_queries(q_ptr, q, tile, stride_qt, stride_qh, GROUP, D // 8)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    base = gl.load(cu_k_ptr + b).to(gl.int32)
    table = table_ptr + b * stride_table
    columns = (g * stride_kh, g * stride_vh)
    span = (0, end)
    strides = (stride_ot, stride_oh)
    gl.warp_specialize(
        [
            (
                _consumer,
                (q, q_rope, k, v, rope, k_full, v_full, empty, span, tile, out_ptr, strides, scale,
                 0, GROUP, R),
            ),
            (
                _consumer,
                (q, q_rope, k, v, rope, k_full, v_full, empty, span, tile, out_ptr, strides, scale,
                 1, GROUP, R),
            ),
            (
                _producer,
                (k_desc, v_desc, r_desc, table, base, columns, k, v, rope, k_full, v_full, empty,
                 span, PAGE, BOX, R),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
