"""Host arrays into tensors that steps read."""

import numpy as np
import torch
from torch import Tensor


def copy_from_host(target: Tensor, values: np.ndarray) -> None:
    """Ordered on the current stream, without waiting for what it was given before; `values` may be
    changed at once."""
    source = torch.from_numpy(values).to(target.dtype)
    if target.is_cuda:  # from pageable memory the host would wait for all steps in flight
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
