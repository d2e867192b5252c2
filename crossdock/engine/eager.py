"""Whether steps are captured in CUDA graphs, decided once and said with its reason."""

import torch

from crossdock.core import EngineConfig

_CAPTURED = ("triton", "flashinfer")


def why_eager(
    config: EngineConfig, device: torch.device, on_device: bool, attention: str
) -> str | None:
    """None: they can be captured.

    Args:
        on_device: whether rows reach the experts without a word to the host.
        attention: the name of its backend.
    """
    reasons = {
        f"{device.type} has no graphs": device.type != "cuda",
        "as asked (enforce_eager)": config.enforce_eager,
        f"transport {config.transport} asks the host in every layer": not on_device,
        f"attention {attention} asks the host for lengths": attention not in _CAPTURED,
        "expert_capacity counts a step's tokens on the host": config.expert_capacity is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
