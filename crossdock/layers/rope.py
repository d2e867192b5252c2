"""Rotary positions (arXiv 2104.09864), linear and YaRN scaling (arXiv 2309.00071).

One rotation serves both layouts of pairs: dimension i turns with i + D/2. Weights whose checkpoint
interleaves the pairs (0, 1), (2, 3) ... are reordered once, when they are loaded, by
`half_split_order`; scores do not see the order as long as queries and keys share it.
"""

import math

import torch
from torch import Tensor

from crossdock.core import RopeSpec


class Rope:
    """Tables for `max_position` positions: cos and sin [positions, D], sin signed for `rotate`."""

    def __init__(
        self,
        spec: RopeSpec,
        max_position: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        angle_PD = torch.arange(max_position).float()[:, None] * inverse_frequencies(spec)
        scale = attention_factor(spec)
        cos, sin = angle_PD.cos() * scale, angle_PD.sin() * scale
        self.cos_PD = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self.sin_PD = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D], to turn [T, heads, D]."""
        cos = self.cos_PD.index_select(0, positions_T).unsqueeze(1)
        return cos, self.sin_PD.index_select(0, positions_T).unsqueeze(1)


def rotate(x_ThD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Separate multiplies and one add: each rounds by itself, so bits never depend on shapes."""
    return (x_ThD * cos_T1D).add_(x_ThD.roll(x_ThD.shape[-1] // 2, -1).mul_(sin_T1D))


def half_split_order(dim: int) -> Tensor:
    """The order of rows that brings interleaved pairs into halves: 0, 2, 4 ... 1, 3, 5 ..."""
    return torch.arange(dim).view(-1, 2).t().flatten()


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float32 [D / 2]."""
    exponent = torch.arange(0, spec.dim, 2).float() / spec.dim
    plain = 1.0 / spec.theta**exponent
    if spec.kind == "default":
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    low, high = (_yarn_dimension(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    steps = torch.arange(spec.dim // 2).float() - low
    # Fast dimensions (below low) keep their frequency, slow ones are stretched.
    stretched = (steps / max(high - low, 0.001)).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The dimension that turns `turns` times within the original context."""
    ratio = spec.original_max_position / (turns * 2 * math.pi)
    return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied with."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return float(spec.attention_factor)
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def softmax_scale(head_dim: int, spec: RopeSpec) -> float:
    """1 / sqrt(head_dim), times the square of YaRN's mscale where the model asks for it."""
    scale = head_dim**-0.5
    if spec.kind == "yarn" and spec.mscale_all_dim:
        scale *= _mscale(spec.factor, spec.mscale_all_dim) ** 2
    return scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
