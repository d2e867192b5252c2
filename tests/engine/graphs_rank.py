"""A GPU rank of test_graphs_gpu.py: replayed steps against eager ones.

Arguments: rank, JSON {"ranks", "store", "config", "out"}. Writes, as JSON, the relative error of
each step's logits by mode, before and after experts have moved.
"""

import json
import os
import random
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import torch

from crossdock.comm import build_world
from crossdock.core import EngineConfig, Plan, Request, SamplingParams, Scheduled
from crossdock.core.batch import GraphSize
from crossdock.engine import build_engine, read_spec
from crossdock.engine.runner import How
from crossdock.launch.start import find_model, resolve

# Per step and rank: (sequence, tokens before, tokens now).
STEPS = (
    ([(0, 0, 37), (1, 0, 300), (2, 0, 5)], [(0, 0, 100)]),
    ([(0, 37, 1), (1, 300, 1), (2, 5, 1)], [(0, 100, 1)]),
    ([(0, 38, 1), (1, 301, 20), (3, 0, 9)], [(0, 101, 1)]),
    ([], [(0, 102, 1)]),
    ([(4, 0, 64)], []),
    ([(4, 64, 1), (0, 39, 1)], []),
)
PAGES = 24


def main() -> None:
    rank, job = int(sys.argv[1]), json.loads(sys.argv[2])
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    config = EngineConfig(ranks=job["ranks"], **job["config"])
    config = replace(config, model=str(find_model(config)))
    config = resolve(config, read_spec(config))
    store = job["store"]
    world = build_world(rank, config.ranks, "cuda", config.transport, {}, store, 60.0, config.tp)
    engine = build_engine(config, world, lambda done, total: None)
    graphs = engine.runner.graphs
    assert graphs is not None, engine.info["graphs"]
    found = {"graphs": engine.info["graphs"], "before": compare(engine, rank)}
    placement = engine.rebalancer.placement.slot_expert_LP
    moved = np.roll(placement, 3, axis=1)
    captured = dict(graphs._graphs)
    engine.rebalance(1, moved, wave=1)
    while not engine.step().sleep:
        pass
    (ended,) = engine.rebalanced
    found["moved"] = [ended.layers, ended.error]
    found["after"] = compare(engine, rank)
    assert all(graphs._graphs[key] is graph for key, graph in captured.items())
    with open(f"{job['out']}/rank{rank}.json", "w") as file:
        json.dump(found, file)


def compare(engine, rank: int) -> list:
    """[step, mode, error] of each step in which this rank samples."""
    runner, world = engine.runner, engine.world
    graphs, group = runner.graphs, rank // world.tp
    tokens = random.Random(group)
    text = [[tokens.randrange(runner.model.head_VH.shape[0]) for _ in range(400)] for _ in range(5)]
    errors = []
    for number, step in enumerate(STEPS):
        mine = step[group] if group < len(step) else []
        plan = Plan(tuple(scheduled(text, *share) for share in mine))
        rows = world.lockstep.exchange((plan.num_tokens, graphs.need(plan)))
        most, need = max(row[0] for row in rows), max(row[1] for row in rows)
        size = graphs.fit(need, most)
        assert isinstance(size, GraphSize)
        with torch.inference_mode():
            want_BV = eager(runner, plan, How(most, "off"))
            modes = ("off", "sbo", "tbo") if size.halves else ("off", "sbo")
            for mode in modes:
                graphs.capture(size, mode)
                for again in range(2):
                    graphs.logits_BV.fill_(float("nan"))
                    got_BV = graphs.replay(plan, size, mode)
                    assert got_BV.shape == want_BV.shape and not got_BV.isnan().any()
                    if plan.items:
                        error = float((got_BV - want_BV).norm() / want_BV.norm())
                        errors.append((number, f"{mode} {again}", error))
    torch.cuda.synchronize()
    engine.transport.check()
    world.lockstep.exchange((0,))
    return errors


def eager(runner, plan: Plan, how: How) -> torch.Tensor:
    return runner.model.logits(runner.hidden(plan, how))


def scheduled(text, sequence: int, start: int, count: int) -> Scheduled:
    pages = range(sequence * PAGES, sequence * PAGES + -(-(start + count) // 16))
    request = Request(str(sequence), tuple(text[sequence]), SamplingParams(), key=sequence)
    now = tuple(text[sequence][start : start + count])
    return Scheduled(request, start, now, tuple(pages), sample=True)


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
    os._exit(0)
