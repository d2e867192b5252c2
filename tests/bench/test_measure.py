import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.planner.hardware import load_hardware


def check(path, variables=None):
    command = [sys.executable, "-m", "crossdock", "check", "--json", "--measure", path]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def unused_port():
    """Where there are any, none of those that the system gives to whoever asks for some port."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(1024, 65536) if not low <= port <= high]
    for port in (*random.sample(ports, len(ports)), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise AssertionError("no port is free")


def test_this_machine_becomes_a_hardware_file(tmp_path):
    path = tmp_path / "here.toml"
    document = json.loads(finish(check(path)))
    assert document["path"] == str(path) and document["text"] == path.read_text()
    here = load_hardware(path)
    assert here.name == "here" and here.outer is None
    assert here.domain_size == min(4, len(os.sched_getaffinity(0)))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here.memory_bytes * here.domain_size == pytest.approx(physical, rel=0.01)
    assert set(here.flops) == {"float32", "bfloat16"}
    assert here.memory_bytes_per_s == pytest.approx(
        document["values"]["memory_gbytes_per_s"] * 1e9, rel=1e-4
    )


def test_ranks_of_two_hosts_measure_the_network(tmp_path):
    """As two `torchrun` agents would start them, one rank each."""
    free_port = unused_port()
    paths = [tmp_path / f"{rank}.toml" for rank in range(2)]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    ranks = [check(p, variables={**common, "RANK": str(r)}) for r, p in enumerate(paths)]
    outs = [finish(process) for process in ranks]
    assert outs[1] == "" and not paths[1].exists()  # the first one writes
    both = load_hardware(paths[0])
    assert both.domain_size == 1 and both.outer is not None
    assert [n for n, _ in both.outer.all_to_all_s] == [4096, 65536, 1 << 20]
    values = json.loads(outs[0])["values"]
    assert len(values["outer"]["alone_gbytes_per_s_per_direction"]) == 1


def test_a_file_that_cannot_be_written(tmp_path):
    path = tmp_path / "missing" / "here.toml"
    process = check(path)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 2 and "cannot be written" in err
    assert json.loads(out)["error"]["exit_code"] == 2
