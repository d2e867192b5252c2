# mypy: disable-error-code="no-untyped-def"
"""The inputs of a captured decode step, put where its graph reads them, in one launch.

n = 2 of 3 rows, tokens (7, -1), drawn (0, 1), ids (4, 9): tokens become (7, 9, 0)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Of up to B decodes of up to P pages. int64: tokens_B (-1: one of those drawn), positions_B,
    slots_B (-1: an empty row, which writes no KV), keys_B, table_BP. int32: lens_B (0 for an empty
    row, which sees no key) and rows_3, how many rows are in use, of all, of the first half and of
    the second."""

    tokens_B: Tensor
    positions_B: Tensor
    slots_B: Tensor
    keys_B: Tensor
    lens_B: Tensor
    table_BP: Tensor
    rows_3: Tensor

    @staticmethod
    def empty(rows: int, pages: int, device: torch.device) -> "DecodeInputs":
        make = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)  # noqa: E731
        return DecodeInputs(
            make(rows), make(rows), make(rows).fill_(-1), make(rows),
            make(rows).int(), make(rows, pages), make(3).int(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "half", "width"])
def _load_kernel(
    tokens_ptr, positions_ptr, slots_ptr, keys_ptr, lens_ptr, table_ptr, drawn_ptr, ids_ptr,
    to_tokens_ptr, to_positions_ptr, to_slots_ptr, to_keys_ptr, to_lens_ptr, to_table_ptr, rows_ptr,
    n, half, width, stride_table, DRAWN: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    live = row < n
    token = tl.load(tokens_ptr + row, mask=live, other=0)
    if DRAWN:
        at = tl.load(drawn_ptr + row, mask=live & (token < 0), other=0)
        token = tl.where(token < 0, tl.load(ids_ptr + at), token)
    tl.store(to_tokens_ptr + row, token)
    tl.store(to_positions_ptr + row, tl.load(positions_ptr + row, mask=live, other=0))
    tl.store(to_slots_ptr + row, tl.load(slots_ptr + row, mask=live, other=-1))
    tl.store(to_keys_ptr + row, tl.load(keys_ptr + row, mask=live, other=0))
    tl.store(to_lens_ptr + row, tl.load(lens_ptr + row, mask=live, other=0))
    if row == 0:
        tl.store(rows_ptr, n)
        tl.store(rows_ptr + 1, tl.minimum(n, half))
        tl.store(rows_ptr + 2, tl.maximum(n - half, 0))
    start = 0
    while start < width:  # what else the table holds is not read
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < width) & live
        page = tl.load(table_ptr + row.to(tl.int64) * width + p, mask=inside, other=0)
        tl.store(to_table_ptr + row.to(tl.int64) * stride_table + p, page, mask=inside)
        start += BLOCK_P


def load_decodes(
    to: DecodeInputs,
    size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    keys_n: Tensor,
    lens_n: Tensor,
    table_nP: Tensor,
    drawn_n: Tensor | None,
    ids: Tensor,
) -> None:
    """The first `size` rows of `to`: n decodes, and empty ones.

    Args:
        drawn_n: where a token is -1, the index of the right one in `ids` (int64).

    Raises:
        ValueError: more rows or pages than there is room for.
    """
    n, width = table_nP.shape
    rows, pages = to.table_BP.shape
    if n > size or size > rows or width > pages:
        raise ValueError(
            f"{n} decodes of {width} pages in {size} rows do not fit buffers for {rows} decodes "
            f"of {pages} pages"
        )
    _load_kernel[(size,)](
        tokens_n, positions_n, slots_n, keys_n, lens_n, table_nP,
        tokens_n if drawn_n is None else drawn_n, ids, to.tokens_B, to.positions_B, to.slots_B,
        to.keys_B, to.lens_B, to.table_BP, to.rows_3, n, size // 2, width, pages,
        DRAWN=drawn_n is not None, BLOCK_P=128, num_warps=1,
    )  # fmt: skip


def load_decodes_twin(
    to: DecodeInputs,
    size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    keys_n: Tensor,
    lens_n: Tensor,
    table_nP: Tensor,
    drawn_n: Tensor | None,
    ids: Tensor,
) -> None:
    n, width = table_nP.shape
    if drawn_n is not None:
        tokens_n = torch.where(tokens_n < 0, ids[drawn_n], tokens_n)
    for there, values, empty in (
        (to.tokens_B, tokens_n, 0),
        (to.positions_B, positions_n, 0),
        (to.slots_B, slots_n, -1),
        (to.keys_B, keys_n, 0),
        (to.lens_B, lens_n, 0),
    ):
        there[n:size] = empty
        there[:n] = values
    to.table_BP[:n, :width] = table_nP
    half = size // 2
    to.rows_3.copy_(torch.tensor([n, min(n, half), max(n - half, 0)]))
