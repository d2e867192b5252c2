"""Routers' bias, adjusted alike on all ranks."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crossdock.core import ConfigError, EngineConfig
from crossdock.engine.router_bias import BiasAdjuster
from crossdock.metrics import Recorder

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 50, 4, 64


class Lockstep:
    """Of threads."""

    def __init__(self, size):
        self.rows, self.barrier = [()] * size, threading.Barrier(size, timeout=30)

    def of(self, rank):
        def exchange(values):
            assert len(values) <= 62
            self.rows[rank] = tuple(values)
            self.barrier.wait()
            table = list(self.rows)
            self.barrier.wait()
            return table

        return SimpleNamespace(exchange=exchange)


class Layer:
    """A softmax router that likes low ids."""

    def __init__(self, generator):
        self.tokens_E = torch.zeros(EXPERTS, dtype=torch.int64)
        self.bias_E = torch.zeros(EXPERTS)
        self.generator = generator
        self.taste_E = -0.04 * torch.arange(EXPERTS)

    def router_bias(self):
        return self.tokens_E, self.bias_E

    def step(self):
        noise_TE = 0.5 * torch.randn(TOKENS, EXPERTS, generator=self.generator)
        scores_TE = (self.taste_E + noise_TE).softmax(dim=1)
        ids = (scores_TE + self.bias_E).topk(TOP_K)[1].view(-1)
        self.tokens_E.scatter_add_(0, ids, torch.ones_like(ids))


def run(size, steps, step=0.002, most=1.0):
    """Each rank's layers, and per window the fullest expert's load over the mean."""
    lockstep = Lockstep(size)
    ranks = [[Layer(torch.Generator().manual_seed(r)) for _ in range(LAYERS)] for r in range(size)]
    adjusters, seen = {}, [[] for _ in range(size)]

    def serve(rank):
        layers = ranks[rank]
        adjusters[rank] = BiasAdjuster(
            lockstep.of(rank), layers, step, most, 4 * size * TOKENS, Recorder()
        )
        before = 0
        for i in range(steps):
            adjusters[rank].advance(size * TOKENS)
            for layer in layers:
                layer.step()
            if i % 4 == 3:
                now = torch.stack([layer.tokens_E for layer in layers])
                seen[rank].append(now - before)
                before = now

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    load_WLE = torch.stack([torch.stack(windows) for windows in seen]).sum(dim=0).float()
    return ranks, adjusters, (load_WLE.amax(dim=2) / load_WLE.mean(dim=2)).mean(dim=1)


@pytest.mark.parametrize("size", [1, 3])
def test_the_bias_evens_out_a_skewed_router(size):
    ranks, adjusters, imbalance = run(size, 160)
    assert imbalance[0] > 2
    assert imbalance[-5:].mean() < 0.5 * imbalance[0]
    for layers in ranks:
        for layer, first in zip(layers, ranks[0], strict=True):
            assert torch.equal(layer.bias_E, first.bias_E)  # the same on all ranks
        assert layers[0].bias_E[0] < 0 < layers[0].bias_E[-1]
    assert {a.updates for a in adjusters.values()} == {39}


def test_a_window_is_a_step_by_sign_and_the_sum_is_clamped():
    ranks, _, _ = run(2, 5, step=0.01)  # one window of four steps
    tokens_LE = sum(torch.stack([layer.tokens_E for layer in layers]) for layers in ranks)
    for layer in ranks[0]:
        assert set(np.round(layer.bias_E.numpy(), 6)) <= {np.float32(v) for v in (-0.01, 0, 0.01)}
    assert (tokens_LE.argmax(dim=1) >= 0).all()
    ranks, adjusters, _ = run(1, 40, step=0.01, most=0.025)
    bias = torch.stack([layer.bias_E for layer in ranks[0]])
    assert bias.abs().max() == pytest.approx(0.025)
    assert adjusters[0]._describe()["router_bias_largest"] == pytest.approx(0.025)


def test_a_window_without_tokens_adjusts_nothing():
    layer = Layer(torch.Generator())
    adjuster = BiasAdjuster(Lockstep(1).of(0), [layer], 0.1, 1.0, 10, Recorder())
    for _ in range(4):
        adjuster.advance(10)
    assert adjuster.updates == 3 and not layer.bias_E.any()


def test_a_full_window_waits_for_a_step_that_runs():
    """What ranks say of it between requests does not depend on who was last asked to sleep."""
    layer = Layer(torch.Generator().manual_seed(0))
    adjuster = BiasAdjuster(Lockstep(1).of(0), [layer], 0.1, 1.0, 10, Recorder())
    adjuster.advance(10)
    layer.step()
    adjuster.advance(0)
    assert adjuster.updates == 0
    adjuster.advance(10)
    assert adjuster.updates == 1


@pytest.mark.parametrize("name", ["expert_capacity", "router_bias_step"])
def test_what_changes_answers_is_refused_in_invariant_mode(name):
    assert EngineConfig("m", **{name: 0.5}).altering == {name: 0.5}
    with pytest.raises(ConfigError, match=f"{name} makes answers depend"):
        EngineConfig("m", invariant=True, **{name: 0.5})
    with pytest.raises(ConfigError, match=f"{name} must be above 0, got -1"):
        EngineConfig("m", **{name: -1.0})
    assert EngineConfig("m", invariant=True, replica_choice="quota").altering == {}
