"""What the start says of a GPU's figures."""

import pytest

from crossdock.cli.starting import activity_line

H200 = {"flops_per_s": 770e12, "bytes_per_s": 4.32e12, "source": "h200.toml"}


@pytest.mark.parametrize(
    ("ceilings", "activity", "words"),
    [
        (H200, "from NVML's performance monitor", ("770 TFLOP/s", "4.32 TB/s", "from NVML")),
        (H200, "nvidia-ml-py is not installed", ("h200.toml", "absent: nvidia-ml-py")),
        (None, "NVML refuses: no", ("no mfu", "hardware", "absent: NVML refuses")),
    ],
)
def test_it_says_what_is_shown_and_why_not(ceilings, activity, words):
    line = activity_line({"ceilings": ceilings, "gpu_activity": activity})
    assert all(word in line for word in words), line
