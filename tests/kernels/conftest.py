"""Kernels run compiled where there is a CUDA device and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

# Read when a kernel is defined, so before any module of crossdock.kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
