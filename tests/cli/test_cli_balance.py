import json
import zipfile

import numpy as np
import pytest
from typer.main import get_command

from crossdock.cli.balance import _read as read_file
from crossdock.cli.main import build_app, run

README = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


@pytest.fixture
def loads(tmp_path):
    path = tmp_path / "loads.json"
    half = (np.array(README) / 2).tolist()
    windows = [{"steps": 5, "tokens": half}, {"steps": 7, "tokens": half}]
    path.write_text(json.dumps({"windows": windows, "expert_bytes": 1 << 20}))
    return path


def planned(capfd, *args):
    code = run(["balance", *map(str, args), "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_the_plan_is_eplb_s_own(loads, capfd):
    plan = planned(capfd, loads, "--ranks", 8, "--redundant", 4, "--nodes", 2, "--groups", 4)
    assert plan["placement"] == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert plan["imbalance_after"] == pytest.approx([1.2081, 1.2422], abs=5e-5)
    # The placement an engine starts with: slots 12 to 15 hold experts 0 to 3 again.
    rank_load = [
        [(row[a] if a > 3 else row[a] / 2) + (row[b] if b > 3 else row[b] / 2) for a, b in PAIRS]
        for row in README
    ]
    before = [max(loads) / (sum(loads) / 8) for loads in rank_load]
    assert plan["imbalance_before"] == pytest.approx(before)
    assert plan["replicas"] == 8 and plan["windows"] == 2 and plan["steps"] == 12
    assert plan["seconds"] > 0
    start = [set(pair) for pair in PAIRS]
    moves = sum(
        len(set(row[2 * r : 2 * r + 2]) - start[r]) for row in plan["placement"] for r in range(8)
    )
    assert plan["moves"] == moves and plan["bytes"] == moves << 20


PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (0, 1), (2, 3)]


@pytest.mark.parametrize("policy", ["eplb", "quota", "llep", "lp", "sticky", "optimal"])
def test_every_policy_plans_and_shows_a_table(loads, policy, capfd):
    plan = planned(capfd, loads, "--ranks", 8, "--redundant", 4, "--policy", policy)
    worse = np.mean(plan["imbalance_before"])
    assert np.mean(plan["imbalance_after"]) <= worse
    assert run(["balance", str(loads), "--ranks", "8", "--redundant", "4", "--policy", policy]) == 0
    out, _ = capfd.readouterr()
    assert f"{policy}: 2 layers x 12 experts on 8 ranks x 2 slots" in out
    assert "before and moves: of the linear placement\n" in out
    assert f"{plan['imbalance_after'][0]:.3f}" in out
    first = " ".join(str(e) if e >= 0 else "-" for e in plan["placement"][0][:2])
    assert f"0  {first} | " in out


def test_a_recorded_placement_is_where_it_starts(tmp_path, capfd):
    path = tmp_path / "loads.json"
    document = {"windows": [{"tokens": [[9, 1, 1, 9]]}], "placement": [[0, 3, 1, 2]]}
    path.write_text(json.dumps(document))
    plan = planned(capfd, path, "--ranks", 2, "--policy", "sticky")
    assert plan["imbalance_before"] == [1.8] and plan["imbalance_after"] == [1.0]
    assert plan["moves"] == 2 and plan["bytes"] is None
    assert plan["before_placement"] == plan["start_placement"] == "recorded"
    assert run(["balance", str(path), "--ranks", "2"]) == 0
    assert "before and moves: of the recorded placement\n" in capfd.readouterr().out


@pytest.fixture
def served(tmp_path):
    """Recorded on 4 slots, one per expert."""
    path = tmp_path / "served.json"
    windows = [{"tokens": [[9, 1, 1, 9], [8, 8, 2, 2]]}]
    placement = [[0, 1, 2, 3], [3, 2, 1, 0]]
    path.write_text(json.dumps({"windows": windows, "placement": placement}))
    return path


@pytest.mark.parametrize("policy", ["eplb", "quota", "llep", "lp", "sticky", "optimal"])
def test_what_would_replicas_gain_over_the_recorded_placement(served, policy, capfd):
    args = [served, "--ranks", 4, "--redundant", 4, "--policy", policy]
    plan = planned(capfd, *args)
    assert plan["imbalance_before"] == [9 / 5, 8 / 5]  # an expert a rank, as recorded
    assert np.mean(plan["imbalance_after"]) < np.mean(plan["imbalance_before"])
    assert plan["recorded_slots"] == 4 and plan["slots_per_rank"] == 2
    assert plan["before_placement"] == "recorded" and plan["start_placement"] == "linear"
    start = [{0, 1}, {2, 3}, {0, 1}, {2, 3}]
    assert plan["moves_by_layer"] == [
        sum(len(set(row[2 * r : 2 * r + 2]) - {-1} - start[r]) for r in range(4))
        for row in plan["placement"]
    ]
    assert run(["balance", *map(str, args)]) == 0
    assert (
        "the recorded placement has 4 slots, not 8: before is of this one over 4 ranks, "
        "moves are from the linear one\n"
    ) in capfd.readouterr().out


def test_sticky_leaves_the_linear_placement_where_it_is_level(tmp_path, capfd):
    path = tmp_path / "loads.json"
    document = {"windows": [{"tokens": [[5, 5, 5, 5]]}], "placement": [[3, 2, 1, 0]]}
    path.write_text(json.dumps(document))
    plan = planned(capfd, path, "--ranks", 2, "--redundant", 4, "--policy", "sticky")
    assert plan["placement"] == [[0, 1, 2, 3, 0, 1, 2, 3]] and plan["moves"] == 0


def test_a_recorded_placement_that_these_ranks_cannot_share(served, tmp_path, capfd):
    args = [served, "--ranks", 3, "--redundant", 2]
    plan = planned(capfd, *args)
    # Linear: 0 1 | 2 3 | 0 1.
    assert plan["imbalance_before"] == pytest.approx([10 / (20 / 3), 8 / (20 / 3)])
    assert plan["before_placement"] == plan["start_placement"] == "linear"
    picture = tmp_path / "map.svg"
    assert run(["balance", *map(str, args), "--plot", str(picture)]) == 0
    assert picture.exists()
    assert (
        "the recorded placement has 4 slots, not 6: before and moves: of the linear one\n"
    ) in capfd.readouterr().out


def test_fewer_slots_than_recorded(tmp_path, capfd):
    path = tmp_path / "loads.json"
    placement = [[0, 3, 1, 3, 2, 0, 0, -1]]
    document = {"windows": [{"tokens": [[9, 1, 1, 9]]}], "placement": placement}
    path.write_text(json.dumps(document))
    plan = planned(capfd, path, "--ranks", 2)
    # Expert 0 thrice, 3 twice: 9/3 + 9/2 + 1 + 9/2 beside 1 + 9/3 + 9/3.
    assert plan["imbalance_before"] == pytest.approx([1.3])
    assert plan["recorded_slots"] == 8 and len(plan["placement"][0]) == 4


def test_a_placement_of_other_layers_is_a_mistake(tmp_path, capfd):
    path = tmp_path / "loads.json"
    document = {"windows": [{"tokens": [[9, 1], [1, 9]]}], "placement": [[0, 1, 0]]}
    path.write_text(json.dumps(document))
    assert run(["balance", str(path), "--ranks", "2"]) == 2
    words = f"{path}: the current placement is 1 x 3, expected 2 layers x 3 slots"
    assert words in capfd.readouterr().err


def test_bytes_come_from_the_model(loads, checkpoint, capfd):
    plan = planned(capfd, loads, "--ranks", 4, "--model", checkpoint)
    assert plan["bytes"] == plan["moves"] * 3 * 32 * 16 * 2  # hidden 32, experts 16 wide, bf16


def test_sglang_s_tensors(tmp_path, capfd):
    import torch

    path = tmp_path / "dump.pt"
    torch.save({"logical_count": torch.tensor(README)[None], "rank": 0}, path)
    plan = planned(capfd, path, "--ranks", 4)
    assert plan["layers"] == 2 and plan["experts"] == 12
    path.write_bytes(b"rubbish")
    assert run(["balance", str(path), "--ranks", "4"]) == 2
    assert "not a file of tensors" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_tensors_that_numpy_does_not_take_as_they_are(tmp_path, dtype):
    import torch

    path, tensor = tmp_path / "dump.pt", torch.tensor(README).to(getattr(torch, dtype))
    tensor.requires_grad_(tensor.is_floating_point())
    for document in ({"logical_count": tensor}, {"windows": [{"tokens": tensor}]}):
        torch.save(document, path)
        assert read_file(path).total_LE().tolist() == README  # up to 256 exact in all of these


def test_tensors_that_hold_no_loads(tmp_path, capfd):
    import torch

    path, tensor = tmp_path / "dump.pt", torch.tensor(README)
    for wrong in (tensor.to_sparse(), tensor.to("meta"), tensor + 1j, tensor > 5):
        torch.save({"logical_count": wrong}, path)
        assert run(["balance", str(path), "--ranks", "4"]) == 2
        assert f"crossdock: error: {path}" in capfd.readouterr().err
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dump/data.pkl", b"")
        archive.writestr("dump/version", b"3")
    assert run(["balance", str(path), "--ranks", "4"]) == 2
    assert "not a file of tensors" in capfd.readouterr().err


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_heat_map(loads, tmp_path, capfd, suffix, magic):
    path = tmp_path / f"map.{suffix}"
    assert run(["balance", str(loads), "--ranks", "4", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(magic)
    assert f"written: {path}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "8", "--redundant", "5"], "nearest values that work: 4 or 12"),
        (["--ranks", "32", "--redundant", "4"], "more ranks than slots"),
        (["--ranks", "8", "--nodes", "3"], "num_nodes 3 does not divide 8 ranks"),
        (["--ranks", "4", "--groups", "5"], "nearest values that work: 4 or 6"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "4", "--redundant", "-4"], "--redundant must be at least 0"),
        (["--ranks", "1000000000"], "expected at most 1048576"),
        (["--ranks", "4", "--redundant", "1000000000"], "expected at most 1048576"),
        (["--ranks", "4", "--policy", "best"], "expected one of eplb, quota, llep, lp, sticky"),
        (["--ranks", "4", "--plot", "map.pdf"], "ends in .png or .svg"),
        (["--ranks", "4", "--plot", "/nowhere/map.png"], "there is no directory /nowhere"),
        (["--ranks", "4", "--model", "/nowhere"], "/nowhere/config.json: not found"),
    ],
)
def test_mistakes(loads, args, words, capfd):
    assert run(["balance", str(loads), *args]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("crossdock: error: ") and words in err


def test_few_flags():
    flags = [p for p in get_command(build_app()).commands["balance"].params if p.opts[0][0] == "-"]
    assert len(flags) <= 12
