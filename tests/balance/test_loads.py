import json
import subprocess
import sys

import numpy as np
import pytest

from crossdock.balance import Loads, parse_loads, read_loads
from crossdock.core import ConfigError


def test_our_document_reads_back(tmp_path):
    load_WLE = np.random.default_rng().integers(0, 1000, (3, 2, 8))
    placement_LP = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 7, -1]] * 2)
    loads = Loads(load_WLE, np.array([10, 20, 30]), placement_LP, 4096)
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(loads.document()))
    again = read_loads(path)
    assert (again.load_WLE == load_WLE).all() and again.steps_W.tolist() == [10, 20, 30]
    assert (again.placement_LP == placement_LP).all() and again.expert_bytes == 4096
    assert (again.total_LE() == load_WLE.sum(axis=0)).all()


def test_dumps_of_other_engines():
    load_WLE = np.random.default_rng().integers(0, 1000, (4, 3, 8))
    sglang = {"logical_count": load_WLE.tolist()}
    vllm = {"load_history": [{"step": 1, "logical_expert_load": w.tolist()} for w in load_WLE]}
    for document in (sglang, vllm, {"logical_count": load_WLE}):
        loads = parse_loads(document, "dump")
        assert (loads.load_WLE == load_WLE).all()
        assert loads.placement_LP is None and loads.expert_bytes is None
    one = parse_loads({"logical_count": load_WLE[0].tolist()}, "dump")
    assert (one.load_WLE == load_WLE[:1]).all()


GOOD = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "expected an object with windows"),
        ({"counts": GOOD}, "got an object with counts"),
        ({"windows": []}, "at least one window"),
        ({"windows": [GOOD]}, r"windows\[0\]: expected an object"),
        ({"windows": [{"steps": 1}]}, r"windows\[0\]: has no tokens"),
        ({"windows": [{"tokens": [[1, 2], [3]]}]}, "rows differ in length"),
        ({"windows": [{"tokens": [["a", "b"]]}]}, "expected numbers"),
        ({"windows": [{"tokens": [[True, False]]}]}, "expected numbers"),
        ({"windows": [{"tokens": [1, 2]}]}, "layers x experts"),
        ({"windows": [{"tokens": [[]]}]}, "expected numbers"),
        ({"windows": [{"tokens": GOOD}, {"tokens": [[1, 2]]}]}, r"windows\[1\].tokens"),
        ({"windows": [{"tokens": [[1, -2], [3, 4]]}]}, r"\[0, 0, 1\] is -2"),
        ({"windows": [{"tokens": [[1, float("nan")], [3, 4]]}]}, r"\[0, 0, 1\] is nan"),
        ({"windows": [{"tokens": [[1, 1e31], [3, 4]]}]}, r"\[0, 0, 1\] is 1e\+31.* to 1e\+30"),
        ({"windows": [{"tokens": GOOD, "steps": 0}]}, r"windows\[0\].steps"),
        ({"windows": [{"tokens": GOOD}], "expert_bytes": -1}, "expert_bytes"),
        ({"windows": [{"tokens": GOOD}], "placement": [[0, 1]]}, "placement is"),
        ({"windows": [{"tokens": GOOD}], "placement": [[0, 1], [1, 1]]}, "no slot for expert 0"),
        ({"windows": [{"tokens": GOOD}], "placement": [[0, 1], [0, 2]]}, "outside -1 to 1"),
        ({"windows": [{"tokens": GOOD}], "placement": [0, 1]}, "layers x slots"),
        ({"logical_count": 3}, r"\[windows, layers, experts\]"),
        ({"load_history": [{"physical_expert_load": GOOD}]}, "has no logical_expert_load"),
    ],
)
def test_what_is_wrong_is_named(document, words):
    with pytest.raises(ConfigError, match=r"^dump: |^dump") as caught:
        parse_loads(document, "dump")
    assert caught.match(words)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_loads(tmp_path / "none.json")
    path = tmp_path / "loads.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_loads(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not JSON"):
            read_loads(path)


def test_an_engine_needs_no_scipy():
    code = "import sys, crossdock.balance; assert not {'scipy', 'torch'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], timeout=280).returncode == 0
