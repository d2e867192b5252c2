"""The checksum of copies of experts against its twin."""

import pytest
import torch

from crossdock.kernels.checksum import checksum, checksum_twin


@pytest.mark.parametrize("size", [0, 2, 4000, 2 * 64 * 4096 + 2, 1_000_002])
def test_it_is_the_twins(device: torch.device, size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    cut = size // 3 // 2 * 2
    for pieces in ([data], [data[:cut], data[cut:]]):
        assert torch.equal(checksum(pieces), checksum_twin([data]))


def test_it_sees_a_swapped_pair_and_no_boundary(device: torch.device) -> None:
    data = torch.randint(0, 256, (4000,), dtype=torch.uint8, device=device)
    whole = checksum([data])
    assert torch.equal(whole, checksum([data[:1000], data[1000:1002], data[1002:]]))
    swapped = data.clone()
    swapped[100:102], swapped[200:202] = data[200:202], data[100:102]
    assert torch.equal(data[100:102], data[200:202]) or not torch.equal(whole, checksum([swapped]))
