import threading
import time

import pytest

from crossdock.comm import Board, SharedMemory, build_world, shm_bytes
from crossdock.comm import shared as shared_module
from crossdock.comm import world as world_module
from crossdock.comm.shared import has_total_store_order, require_total_store_order
from crossdock.comm.world import resolve_device, resolve_transport
from crossdock.core import CapacityError, ConfigError, RankLost


def test_more_than_is_free_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(shared_module, "_cgroup_headroom", lambda: 3 << 20)
    with pytest.raises(CapacityError, match=r"5 MiB of shared memory, 3 MiB are free"):
        SharedMemory.create(5 << 20)


def test_the_size_grows_with_everything_it_depends_on():
    base = {
        "ranks": 4,
        "max_tokens": 64,
        "hidden": 256,
        "top_k": 4,
        "dtype_bytes": 2,
        "per_expert": False,
    }
    size = shm_bytes(**base)
    more = {"ranks": 5, "max_tokens": 65, "hidden": 257, "top_k": 5, "dtype_bytes": 4}
    for name, value in more.items():
        assert shm_bytes(**{**base, name: value}) > size
    assert shm_bytes(**{**base, "top_k": 8, "per_expert": True}) > size
    rows = 2 * 4 * 4 * 64 * 256 * 2
    assert 2 * rows < size < 2 * rows + 2 * 4 * 4 * 64 * 8 * 8 + 20 * 4096
    assert shm_bytes(8) <= 8 * 4096


def test_two_mappings_see_the_same(tmp_path):
    memory = SharedMemory.create(8192)
    again = SharedMemory.attach(memory.fd)
    memory.words(4096, 2)[1] = -7
    assert again.words(4096, 2).tolist() == [0, -7]
    memory.close_fd()
    again.words(0, 1)[0] = 1
    assert memory.words(0, 1)[0] == 1


def test_other_processors_are_told_what_to_set():
    assert has_total_store_order("x86_64") and not has_total_store_order("aarch64")
    with pytest.raises(ConfigError, match=r'aarch64.*transport = "collective"'):
        require_total_store_order("aarch64")


def test_the_board_tells_where_each_rank_is():
    memory = SharedMemory.create(shm_bytes(3))
    boards = [Board(rank, 3, memory) for rank in range(3)]
    boards[1].enter("combine", 0, step=17)
    boards[2].enter("sample")
    boards[2].beat()
    assert boards[0].where(1) == ("combine", 0, 17)
    assert boards[0].where(2) == ("sample", -1, 0)
    assert boards[0].describe(1) == (
        "rank 1, last seen in combine of MoE layer 0, step 17; no heartbeat yet"
    )
    assert "running, but slow" in boards[0].describe(2)
    with pytest.raises(KeyError):
        boards[0].enter("nowhere")
    memory.close_fd()


def test_transport_and_device_are_chosen_or_refused(monkeypatch):
    assert resolve_transport("auto", 1, "cpu") == "local"
    assert resolve_transport("auto", 4, "cpu") == "shm"
    assert resolve_transport("auto", 2, "cuda") == "collective"
    assert resolve_transport("collective", 4, "cpu") == "collective"
    for choice, size, device in (("local", 2, "cpu"), ("shm", 2, "cuda")):
        with pytest.raises(ConfigError):
            resolve_transport(choice, size, device)
    assert resolve_device("cpu", 3, 4).type == "cpu"
    with pytest.raises(ConfigError, match="1000 CUDA devices"):
        resolve_device("cuda", 0, 1000)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r'^1 rank needs 1 CUDA device, 0 found; set device = "cpu"'
    ):
        resolve_device("cuda", 0, 1)


def test_a_rank_that_does_not_start_is_named_before_any_group_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(world_module, "_START_S", 0.1)
    memory = SharedMemory.create(shm_bytes(2))
    fds = {"shm": memory.fd}
    with pytest.raises(RankLost, match=r"come to the start within 0\.1 s: rank 1") as caught:
        build_world(0, 2, "cpu", "collective", fds, str(tmp_path / "store"), 60.0)
    assert caught.value.rank == 1
    memory.close_fd()


def test_a_rank_that_waits_for_another_to_start_goes_on_beating(monkeypatch, tmp_path):
    """Or the gateway would call it lost. The groups, made afterwards, are not this test's."""
    monkeypatch.setattr(world_module, "_gloo", lambda *args: None)
    memory = SharedMemory.create(shm_bytes(2))
    board = Board(1, 2, memory)
    arguments = (2, "cpu", "collective", {"shm": memory.fd}, str(tmp_path / "store"), 0.05)
    first = threading.Thread(target=build_world, args=(0, *arguments))
    first.start()
    try:
        age, beats, until = board.heartbeat_age(0), 0, time.monotonic() + 30
        while beats < 3 and time.monotonic() < until:
            before, age = age, board.heartbeat_age(0)
            beats += age < before  # else it only grows
        assert beats == 3 and first.is_alive()
    finally:
        build_world(1, *arguments)
        first.join(30)
    assert not first.is_alive()
    memory.close_fd()
