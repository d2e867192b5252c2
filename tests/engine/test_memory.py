"""What the experts of a rank may hold at once."""

from types import SimpleNamespace

import torch

from crossdock.core import EngineConfig
from crossdock.engine.memory import CPU_EXPERT_BYTES, GIB, expert_workspace


def test_experts_may_hold_a_twentieth_of_a_gpu(monkeypatch):
    total = {0: 80 * GIB, 1: 140 * GIB}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=total[device.index]),
    )
    config = EngineConfig("model")
    assert expert_workspace(config, torch.device("cuda", 0)) == 4 * GIB
    assert expert_workspace(config, torch.device("cuda", 1)) == 7 * GIB
    given = EngineConfig("model", expert_workspace_gib=1.5)
    assert expert_workspace(given, torch.device("cuda", 0)) == 3 * GIB // 2
    assert expert_workspace(given, torch.device("cpu")) == CPU_EXPERT_BYTES
