"""Kernels run compiled where there is a CUDA device and in Triton's interpreter elsewhere."""

import os

import torch

# Read when a kernel is defined, so before any test module imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
