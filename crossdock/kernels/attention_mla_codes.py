# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005  # Triton knows no starred elements
"""How `attention_mla_hopper` brings an E4M3 cache into shared memory: latents as FP16 without their
scale, which one instruction a pair does exactly; scores and weights are multiplied by it instead.
Rotated parts in BF16 and in units of that scale, so that one accumulator sums both products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

_WORDS = gl.constexpr(144)
"""Of four codes, a row: 128 of latents, 16 of the rotated part."""


@gluon.jit
def _fp16_pairs(words):
    """[N, w] of four codes to [N, 2 w] of two FP16."""
    low, high = gl.inline_asm_elementwise(
        """{ .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b; }""",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _bf16_pairs(words, factor):
    """[N, w] of four codes, each times a factor [N, 1], to [N, 2 w] of two BF16."""
    low, high = gl.inline_asm_elementwise(
        """{ .reg .b16 a, b, e, f; .reg .b32 x; .reg .f32 y, z;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        mov.b32 {e, f}, x;
        cvt.f32.f16 y, e;
        cvt.f32.f16 z, f;
        mul.f32 y, y, $3;
        mul.f32 z, z, $3;
        cvt.rn.bf16x2.f32 $0, z, y;
        cvt.rn.f16x2.e4m3x2 x, b;
        mov.b32 {e, f}, x;
        cvt.f32.f16 y, e;
        cvt.f32.f16 z, f;
        mul.f32 y, y, $3;
        mul.f32 z, z, $3;
        cvt.rn.bf16x2.f32 $1, z, y; }""",
        "=r,=r,r,f",
        [words, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _pages(table_ptr, n, end, PAGE: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Of ROWS keys from n on; past the end page 0."""
    pos = n + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return gl.load(table_ptr + pos // PAGE, mask=pos < end, other=0).to(gl.int32)


@gluon.jit
def _both_pages(
    table_ptr, n, end, PAGE: gl.constexpr, ROWS: gl.constexpr, wide: gl.constexpr,
    slim: gl.constexpr,
):  # fmt: skip
    return (
        _pages(table_ptr, n, end, PAGE, ROWS, wide),
        _pages(table_ptr, n, end, PAGE, ROWS, slim),
    )


@gluon.jit
def _codes(cache_ptr, slot, FIRST: gl.constexpr, WORDS: gl.constexpr, layout: gl.constexpr):
    """Four a word: carried through a loop as codes, each would take a register."""
    i = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    return gl.load(cache_ptr + slot[:, None].to(gl.int64) * _WORDS + i[None, :])


@gluon.jit
def _piece(
    cache_ptr, scale_ptr, pages, n, end, PAGE: gl.constexpr, ROWS: gl.constexpr,
    wide: gl.constexpr, slim: gl.constexpr,
):  # fmt: skip
    """Codes of latents and of rotated parts of ROWS keys, and the scales of both."""
    latent_page, rotated_page = pages
    latent_slot = latent_page * PAGE + (n + gl.arange(0, ROWS, gl.SliceLayout(1, wide))) % PAGE
    pos = n + gl.arange(0, ROWS, gl.SliceLayout(1, slim))
    rotated_slot = rotated_page * PAGE + pos % PAGE
    at = scale_ptr + rotated_slot.to(gl.int64) * 2
    return (
        _codes(cache_ptr, latent_slot, 0, 128, wide),
        _codes(cache_ptr, rotated_slot, 128, 16, slim),
        gl.load(at, mask=pos < end, other=1.0),
        gl.load(at + 1, mask=pos < end, other=1.0),
    )


@gluon.jit
def converter(
    cache_ptr, scale_ptr, table_ptr, keys, barriers, span, PAGE: gl.constexpr,
    ROWS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """In the place of the hopper kernel's producer, by WARPS warps: ROWS keys at a time, AHEAD
    times as many on their way meanwhile, and the pages of those after them, so that no load waits
    for another's address."""
    kv, rope, unit = keys
    full, empty = barriers
    STAGES: gl.constexpr = kv.type.shape[0]
    KEYS: gl.constexpr = kv.type.shape[1]
    # 8 codes a lane: their FP16 values go to all banks at once.
    wide: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    slim: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [WARPS, 1], [1, 0])
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    start, end = span
    pages = _both_pages(table_ptr, start, end, PAGE, ROWS, wide, slim)
    coming = (_piece(cache_ptr, scale_ptr, pages, start, end, PAGE, ROWS, wide, slim),)
    for i in gl.static_range(1, AHEAD):
        n = start + i * ROWS
        pages = _both_pages(table_ptr, n, end, PAGE, ROWS, wide, slim)
        coming = coming + (_piece(cache_ptr, scale_ptr, pages, n, end, PAGE, ROWS, wide, slim),)
    pages = _both_pages(table_ptr, start + AHEAD * ROWS, end, PAGE, ROWS, wide, slim)
    for n in range(start, end, KEYS):
        step = (n - start) // KEYS
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
        latents = kv.index(stage)._reinterpret(gl.int32, [KEYS, 256], pairs)
        rotated = rope.index(stage)._reinterpret(gl.int32, [KEYS, 32], pairs)
        for i in gl.static_range(KEYS // ROWS):
            latent_codes, rotated_codes, latent_scale, rotated_scale = coming[0]
            latents.slice(i * ROWS, ROWS).store(_fp16_pairs(latent_codes))
            # Slots that nobody has written have scales of 0.
            in_units = (rotated_scale / gl.maximum(latent_scale, 1e-20))[:, None]
            rotated.slice(i * ROWS, ROWS).store(_bf16_pairs(rotated_codes, in_units))
            unit.index(stage).slice(i * ROWS, ROWS).store(latent_scale)
            following = n + (i + AHEAD) * ROWS
            piece = _piece(cache_ptr, scale_ptr, pages, following, end, PAGE, ROWS, wide, slim)
            pages = _both_pages(table_ptr, following + ROWS, end, PAGE, ROWS, wide, slim)
            coming = coming[1:] + (piece,)
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)
