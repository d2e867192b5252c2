import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from crossdock.cli import doctor
from crossdock.cli.check import _human
from crossdock.cli.starting import placement_line

TOPOLOGY = """\
	GPU0	GPU1	GPU2	NIC0	CPU Affinity
GPU0	 X 	NV18	SYS	PIX	0-31
GPU1	NV18	 X 	NODE	SYS	0-31
GPU2	SYS	NODE	 X 	SYS	32-63
NIC0	PIX	SYS	SYS	 X

Legend:

  X    = Self
"""


def test_check_json_parses():
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "check", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["cpu"]["free_bytes"] <= found["cpu"]["memory_bytes"]
    can = {c["name"]: c for c in found["capabilities"]}
    assert can["one CPU rank"]["works"]
    assert not can["one GPU"]["works"] and can["one GPU"]["reason"] == "no GPU"
    assert found["devices"] == [] and found["links"] == []


def test_links_of_a_topology():
    assert doctor.parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    assert doctor.parse_topology("no devices were found") == {}


class FakeCuda:
    """Two GPUs as torch would tell of them."""

    __version__ = "2.99"

    class cuda:
        class nccl:
            version = staticmethod(lambda: (2, 27, 5))

        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        mem_get_info = staticmethod(lambda index: (70 * 2**30, 80 * 2**30))
        can_device_access_peer = staticmethod(lambda a, b: True)

        @staticmethod
        def get_device_properties(index):
            return type("P", (), {"name": f"GPU {index}", "major": 9, "minor": 0})

    class distributed:
        is_available = staticmethod(lambda: True)
        is_nccl_available = staticmethod(lambda: True)
        is_gloo_available = staticmethod(lambda: True)


def render(found):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(_human(found))
    return console.export_text()


def test_with_gpus(monkeypatch):
    monkeypatch.setattr(doctor, "_import_torch", lambda problems: FakeCuda)
    monkeypatch.setattr(doctor, "_topology", lambda: {(0, 1): "NV18"})
    found = doctor.examine()
    assert found["nccl"] == "2.27.5"
    assert [d["name"] for d in found["devices"]] == ["GPU 0", "GPU 1"]
    assert found["links"] == [{"a": 0, "b": 1, "link": "NV18", "peer_access": True}]
    can = {c["name"]: c for c in found["capabilities"]}
    assert can["GPU ranks through collective"]["works"]
    assert "1 of 1 pairs" in can["GPU ranks through collective"]["reason"]
    assert "NV18+" in render(found)


def test_a_broken_driver_is_a_finding(monkeypatch):
    class Broken(FakeCuda):
        class cuda(FakeCuda.cuda):
            @staticmethod
            def device_count():
                raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "_import_torch", lambda problems: Broken)
    found = doctor.examine()
    assert any("driver too old" in p for p in found["problems"])
    assert "driver too old" in render(found)
    assert {c["name"]: c["works"] for c in found["capabilities"]}["one CPU rank"]


def test_nothing_runs_without_torch(monkeypatch):
    def no_torch(problems):
        problems.append("torch cannot be imported: gone")

    monkeypatch.setattr(doctor, "_import_torch", no_torch)
    found = doctor.examine()
    assert not any(c["works"] for c in found["capabilities"])


@pytest.mark.parametrize(
    ("ranks", "slots", "words"),
    [
        (4, 32, "8 a rank"),
        (3, 33, "rounded up"),
        (4, 36, "4 replicas"),
        (40, 40, "rounded up"),
    ],
)
def test_placement_line(ranks, slots, words):
    line = placement_line(32, ranks, slots)
    assert words in line
    assert ("rounded up" in line) == (words == "rounded up")
