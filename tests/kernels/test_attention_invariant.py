"""Attention of fixed tiles against float64 over a scattered cache; on GPUs also bit by bit, a token
alone against the same token in a prefill, in chunks and among other sequences."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from crossdock.cache import KVCache
from crossdock.core import GQASpec, MLASpec
from crossdock.kernels.attention_invariant import attention_invariant, tile_tokens
from crossdock.layers.attention.cached import write_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
SPECS: dict[str, GQASpec | MLASpec] = {
    "gqa": GQASpec(6, 2, 16),
    "window": GQASpec(4, 4, 24, sliding_window=21),
    "mla": MLASpec(5, None, 40, 8, 16, 8),
}
WIDE: dict[str, GQASpec | MLASpec] = {
    "gqa": GQASpec(32, 4, 128),
    "one head a key": GQASpec(4, 4, 64),
    "window": GQASpec(8, 2, 128, sliding_window=100),
    "mla": MLASpec(16, None, 512, 128, 64, 128),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@dataclass(frozen=True, eq=False)
class Case:
    """Sequences of `lens` tokens, all of whose keys are cached; queries of all of them."""

    spec: GQASpec | MLASpec
    dtype: torch.dtype
    page: int
    cache: tuple[Tensor, ...]
    table_BP: Tensor
    q_SThD: list[Tensor]

    def run(self, work: list[tuple[int, int, int]], tokens: int | None = None) -> Tensor:
        """Of (sequence, first, end) each; `tokens`: of a tile, the most there may be by default."""
        s = self.spec
        latent = s.kv_lora_rank if isinstance(s, MLASpec) else None
        group = s.num_heads if isinstance(s, MLASpec) else s.num_heads // s.num_kv_heads
        step = min(tile_tokens(group, self.dtype), tokens or 1 << 30)
        tiles, start = [], 0
        for row, (_, first, end) in enumerate(work):
            tiles += [
                (row, start + i, min(step, end - first - i)) for i in range(0, end - first, step)
            ]
            start += end - first
        positions = torch.cat([torch.arange(first, end) for _, first, end in work])
        return attention_invariant(
            torch.cat([self.q_SThD[b][first:end] for b, first, end in work]),
            self.cache,
            torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
            positions.to(DEVICE),
            self.table_BP[[b for b, _, _ in work]],
            0.25,
            self.page,
            latent,
            getattr(s, "sliding_window", None),
        )


def make(
    spec: GQASpec | MLASpec, dtype: torch.dtype, lens: list[int], page: int, fp8: bool = False
):
    """(case, keys and values float64 by sequence, as they are cached)."""
    torch.manual_seed(sum(lens))
    pages = [-(-n // page) for n in lens]
    order = torch.randperm(sum(pages))
    cache = KVCache(spec, 1, sum(pages), page, FP8 if fp8 else dtype, DEVICE).layer(0)
    table = torch.zeros(len(lens), max(pages), dtype=torch.int64)
    keys, queries = [], []
    for b, n in enumerate(lens):
        mine = order[sum(pages[:b]) :][: pages[b]]
        table[b, : pages[b]] = mine
        at = torch.arange(n)
        slots = (mine[at // page] * page + at % page).to(DEVICE)
        if isinstance(spec, MLASpec):
            L, width = spec.kv_lora_rank, spec.kv_width
            x = torch.randn(n, width, device=DEVICE).to(dtype)
            for i, part in enumerate((slice(0, L), slice(L, None))):
                write_rows(cache[0][:, part], cache[1][:, i] if fp8 else None, slots, x[:, part])
            read = cache[0][slots].double()
            if fp8:
                read = torch.cat(
                    (read[:, :L] * cache[1][slots, :1], read[:, L:] * cache[1][slots, 1:]), dim=1
                )
            keys.append((read[:, None], read[:, None, :L]))
        else:
            width = spec.head_dim
            for i in range(2):
                x = torch.randn(n, spec.num_kv_heads, width, device=DEVICE).to(dtype)
                write_rows(cache[i], cache[2 + i] if fp8 else None, slots, x)
            k, v = (
                cache[i][slots].double() * (cache[2 + i][slots][..., None] if fp8 else 1)
                for i in range(2)
            )
            keys.append((k, v))
        queries.append(torch.randn(n, spec.num_heads, width, device=DEVICE).to(dtype))
    return Case(spec, dtype, page, cache, table.to(DEVICE), queries), keys


def reference(case: Case, keys: tuple[Tensor, Tensor], b: int) -> Tensor:
    """float64 [n, h, V] of a whole sequence."""
    (k, v), q = keys, case.q_SThD[b].double()
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(group, 1)) * 0.25
    i = torch.arange(len(q), device=DEVICE)
    hidden = i[None] > i[:, None]
    if (window := getattr(case.spec, "sliding_window", None)) is not None:
        hidden |= i[None] <= i[:, None] - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, v.repeat_interleave(group, 1))


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got.double() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_against_float64(name: str, dtype: torch.dtype, fp8: bool) -> None:
    case, keys = make(SPECS[name], dtype, [1, 18, 70], 8, fp8)
    got = case.run([(0, 0, 1), (2, 69, 70), (1, 0, 18), (2, 52, 67)])
    want = [reference(case, k, b) for b, k in enumerate(keys)]
    expected = torch.cat([want[0], want[2][69:], want[1], want[2][52:67]])
    close(got, expected, TOLERANCE[dtype] if dtype == torch.float32 or not fp8 else 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_a_token_alone_is_the_same_token(name: str, dtype: torch.dtype, fp8: bool) -> None:
    lens = [331, 70, 1, 200]
    case, keys = make(WIDE[name], dtype, lens, 16, fp8)
    want = reference(case, keys[0], 0)
    alone = torch.cat([case.run([(0, i, i + 1)]) for i in range(331)])
    close(alone, want, TOLERANCE[dtype] if not fp8 else 8e-3)
    assert torch.equal(case.run([(0, 0, 331)]), alone), "whole"
    for tokens in (1, 2, 3, 5):
        assert torch.equal(case.run([(0, 0, 331)], tokens), alone), f"tiles of {tokens} tokens"
    for first, end in ((0, 7), (7, 8), (8, 64), (64, 127), (127, 130), (130, 331)):
        mixed = [(2, 0, 1), (3, 199, 200), (0, first, end), (1, 3, 70)]
        rows = case.run(mixed)[2 : 2 + end - first]
        assert torch.equal(rows, alone[first:end]), (first, end)
    again, _ = make(WIDE[name], dtype, lens, 16, fp8)
    wide = torch.nn.functional.pad(again.table_BP, (0, 5))
    moved = Case(again.spec, dtype, 16, again.cache, wide, again.q_SThD)
    assert torch.equal(moved.run([(0, 300, 331)]), alone[300:]), "a wider table"
