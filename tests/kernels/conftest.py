import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
