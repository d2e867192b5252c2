"""Whether a model runs in FP8: its products of attention and MLPs, its experts, and the rows on
their way to them, in blocks of 128x128 weights and 128 channels of a row."""

import torch

from crossdock.core import ConfigError, EngineConfig, ModelSpec
from crossdock.core.staging import SCALE_BLOCK, padded

_LEAST_CAPABILITY = (8, 9)
"""The first GPUs that multiply E4M3."""


def asks_for_fp8(config: EngineConfig, spec: ModelSpec) -> bool:
    """By its own setting, or because the checkpoint is quantised."""
    return config.quantize == "fp8" or (config.quantize == "auto" and spec.quant is not None)


def runs_in_fp8(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: str, transport: str
) -> bool:
    """`device`, `dtype` and `transport` as they were resolved.

    Raises:
        ConfigError: quantize = "fp8" where that cannot run.
    """
    if not asks_for_fp8(config, spec):
        return False
    against = why_not_fp8(config, spec, device, dtype, transport)
    if against and config.quantize == "fp8":
        raise ConfigError(f'quantize = "fp8" cannot run: {against}')
    return against is None


def why_not_fp8(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: str, transport: str
) -> str | None:
    block = spec.quant.block if spec.quant else (SCALE_BLOCK, SCALE_BLOCK)
    if config.invariant:
        return "invariant mode has no FP8 products"
    if block != (SCALE_BLOCK, SCALE_BLOCK):
        return f"the checkpoint has blocks of {list(block)}, the kernels take [128, 128]"
    if dtype != "bfloat16":
        return f"activations must be bfloat16, not {dtype}"
    if transport != "nvlink":
        return f'FP8 experts take rows of the "nvlink" transport, not of {transport!r}'
    return _device_against(device)


def _device_against(device: torch.device) -> str | None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} has no FP8 products"
        return None
    from crossdock.kernels.quant import INTERPRET  # imports triton

    return None if INTERPRET.value else "the kernels need a GPU"


def wire_hidden(spec: ModelSpec, fp8: bool) -> int:
    """Values of a row on its way to experts."""
    return padded(spec.hidden_size) if fp8 else spec.hidden_size
