"""Weights that no checkpoint holds: random ones of a checkpoint's shapes, made where they are used.

For measuring real sizes without real weights. A tensor's values depend on its name alone, so ranks
that hold the same tensor hold the same values.
"""

import zlib

import torch
from torch import Tensor

from crossdock.core.staging import SCALE_BLOCK
from crossdock.models.fp8 import FP8, Matrix, widen
from crossdock.models.weights import WeightSource

_CODE_STD = 100.0


class DummyWeights(WeightSource):
    """Norms are 1; a matrix has the variance that keeps the size of what passes through."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int):
        self._dtype, self._device, self._seed = dtype, device, seed

    def has(self, name: str) -> bool:
        """Experts are one by one, and blocks have the first name that a family knows."""
        return not name.endswith("experts.gate_up_proj")

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> Tensor:
        dtype = torch.float32 if fp32 else self._dtype
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        if "norm" in name:
            return weight.fill_(1.0)
        if len(shape) == 1:
            return weight.zero_()
        generator = self._generator(name)
        # As checkpoints store it, also where it is wanted in float32.
        values = weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        return values.bfloat16().to(dtype) if fp32 else values

    def get_slice(
        self, name: str, index: int, shape: tuple[int, ...], fp32: bool = False
    ) -> Tensor:
        return self.get(f"{name}.{index}", shape, fp32)

    def in_fp8(self, name: str) -> bool:
        return True

    def get_fp8(
        self,
        name: str,
        shape: tuple[int, int],
        index: int | None = None,
        order: Tensor | None = None,
    ) -> Matrix:
        """Codes that use the range of E4M3 under one scale; in any order they are random."""
        name = name if index is None else f"{name}.{index}"
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        values.normal_(0.0, _CODE_STD, generator=self._generator(name)).clamp_(-448.0, 448.0)
        blocks = tuple(-(-n // SCALE_BLOCK) for n in shape)
        scales = torch.full(blocks, shape[1] ** -0.5 / _CODE_STD, device=self._device)
        return widen(values.to(FP8), scales)

    def _generator(self, name: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(name.encode()) + self._seed)
        return generator
