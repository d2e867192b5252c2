"""Kernels run compiled where there is a CUDA device and in Triton's interpreter elsewhere."""

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("hypothesis"):  # what runs on GPUs does without it
    from hypothesis import HealthCheck, settings

    # How long an example takes, or drawing it, says how busy the machine is.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# Read when a kernel is defined, so before any test module imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they do not run where there is no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
