"""Runs the cast kernels over what comes on stdin's file and saves what they give."""

import sys

import torch
import triton
import triton.language as tl

from crossdock.kernels.rounding import cast_rows, quantise_blocks

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def cast_all(x, narrow, q, scales, count, INTERPRET: tl.constexpr):
    groups, lanes = tl.arange(0, 8), tl.arange(0, 128)
    at = tl.program_id(0) * 1024 + groups[:, None] * 128 + lanes[None, :]
    values = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(narrow + at, cast_rows(values, tl.bfloat16, INTERPRET), mask=at < count)
    bits, scale = quantise_blocks(values, INTERPRET)
    tl.store(q + at, bits, mask=at < count)
    group = tl.program_id(0) * 8 + groups
    tl.store(scales + group, scale, mask=group * 128 < count)


x = torch.load(sys.argv[1]).to(sys.argv[3])
narrow, q = (
    torch.empty_like(x, dtype=torch.bfloat16),
    torch.empty_like(x, dtype=torch.float8_e4m3fn),
)
scales = x.new_empty(x.shape[0], x.shape[1] // 128)
grid = (triton.cdiv(x.numel(), 1024),)
cast_all[grid](x, narrow, q, scales, x.numel(), INTERPRET=INTERPRET.value)
torch.save([t.cpu() for t in (narrow, q.view(torch.uint8), scales)], sys.argv[2])
