"""Many small host arrays to the device in one copy that the host does not wait for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
"""Bytes; kernels are compiled for pointers that are aligned so."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Tensors of the same shapes and dtypes; on a GPU views of one buffer. The copy is ordered on
    the current stream, and the arrays may be changed at once."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    pinned = torch.empty(max(end, 1), dtype=torch.uint8, pin_memory=True)
    raw = pinned.numpy()
    for start, array in zip(starts, arrays, strict=True):
        raw[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
