"""What runs before readiness, with a runner that notes what it is given."""

from types import SimpleNamespace

import pytest
import torch

from crossdock.comm import build_world
from crossdock.core.batch import GraphSize
from crossdock.engine import ready
from crossdock.engine.made_up import Limits, Meter, made_up, warm_up
from crossdock.engine.overlap import OverlapPolicy, Rung

LIMITS = Limits(
    max_num_seqs=24, max_num_batched_tokens=600, max_model_len=128, page_size=16, num_pages=64,
    vocab_size=50,
)  # fmt: skip


class Graphs:
    """They take everything."""

    def __init__(self):
        self.captured = []

    def need(self, plan):
        return plan.num_tokens

    def fit(self, need, tokens):
        return GraphSize(True, 1024)

    def capture(self, size, mode):
        self.captured.append((size, mode))


@pytest.mark.parametrize("mode", ["off", "tbo"])
def test_eager_steps_are_compiled_where_graphs_take_all_that_is_made_up(tmp_path, mode):
    world = build_world(0, 1, "cpu", "local", {}, str(tmp_path / "store"), 60.0)
    ran, cleared = [], []
    runner = SimpleNamespace(
        graphs=Graphs(),
        kv=SimpleNamespace(clear=cleared.append),
        run=lambda plan, how: ran.append((plan, how)),
    )
    warm_up(runner, world, LIMITS, mode)
    assert not runner.graphs.captured and all(how.graph is None for _, how in ran)
    assert [p.num_decodes for p, _ in ran if p.num_decodes == len(p.items)] == [1, 3, 16, 24]
    assert [p.num_tokens for p, _ in ran if p.num_decodes == 0] == [37, 512, 600]
    assert cleared == [1 + max(page for p, _ in ran for item in p.items for page in item.pages)]
    Meter(runner, world).seconds(made_up(8, LIMITS, 0), mode)
    assert ran[-1][1].graph == GraphSize(True, 1024) and len(runner.graphs.captured) == 1


@pytest.mark.parametrize(
    ("captures", "rungs", "warmed"), [(True, 2, 1), (True, 1, 1), (False, 1, 1), (False, 2, 0)]
)
def test_readiness_waits_for_eager_steps_that_nothing_ran(monkeypatch, captures, rungs, warmed):
    policy = OverlapPolicy("auto", tuple(Rung(8 * i, "off") for i in range(rungs)), "measured")
    done = []
    monkeypatch.setattr(ready, "_overlap", lambda *args: policy)
    monkeypatch.setattr(ready, "warm_sampler", lambda sampler: None)
    monkeypatch.setattr(ready, "warm_up", lambda *args: done.append(args[-1]))
    graphs = SimpleNamespace(capture_all=lambda choose: done.append("captured"))
    runner = SimpleNamespace(graphs=graphs if captures else None, sampler=None)
    world = SimpleNamespace(device=torch.device("cuda"))
    assert ready.make_ready(None, None, runner, world, LIMITS) is policy
    assert done == ["captured"] * captures + ["off"] * warmed
