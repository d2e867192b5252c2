"""What an exchange refuses, and the words for what its kernels could not do."""

import torch
from torch import Tensor

from crossdock.core import CapacityError, CrossdockError, RankLost
from crossdock.kernels.signals import BAD_SLOT, SLOT_FULL, STAGES


def expect(
    name: str, got: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """
    Raises:
        CrossdockError: `got` is something else, or not contiguous.
    """
    same = tuple(got.shape) == shape and got.dtype == dtype and got.is_contiguous()
    if not same or got.device != device:
        raise CrossdockError(
            f"{name} must be contiguous {dtype} {list(shape)} on {device}, got {got.dtype} "
            f"{list(got.shape)}, strides {got.stride()}, on {got.device}"
        )


def explain(code: int, rank: int, num_slots: int) -> CrossdockError:
    """Of the word that a kernel of `rank` left."""
    kind, number = code >> 32, (code & 0xFFFFFFFF) - 1
    if kind == BAD_SLOT:
        return CrossdockError(
            f"token {number} of rank {rank} was sent to a slot that no rank has; slots are 0 to "
            f"{num_slots - 1}, or -1 for none"
        )
    if kind == SLOT_FULL:
        return CapacityError(
            f"tokens of rank {number} name a slot of rank {rank} more than once, for which masked "
            "rows have no room; make the slots of each token distinct"
        )
    return RankLost(
        f"rank {number} did not come to {STAGES[kind]} in time; rank {rank} gave up", number
    )
