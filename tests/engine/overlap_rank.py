"""A rank process of test_overlap_ranks.py: the same steps, and the same requests, in every mode.

Arguments: rank, JSON list of cases {"size", "fd", "directory", "config", "steps"}. A case runs on
its first `size` ranks; each writes DIRECTORY/rank<RANK>.npz: the logits of every sampled row by
mode, the tokens that `Engine.step` made of this rank's requests by mode, and what the engine said
of its overlap.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from crossdock.comm import build_world
from crossdock.core import EngineConfig, Plan, Request, SamplingParams, Scheduled
from crossdock.engine import agree, build_engine
from crossdock.engine.overlap import OverlapPolicy, Rung, forced
from crossdock.engine.runner import How

MODES = ("off", "sbo", "tbo")


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    for case in json.loads(sys.argv[2]):
        if rank < case["size"]:
            run_case(rank, Path(case["directory"]), case)


def run_case(rank: int, directory: Path, case: dict) -> None:
    config = EngineConfig(**case["config"])
    world = build_world(
        rank, config.ranks, "cpu", config.transport, {"shm": case["fd"]}, str(directory / "store"),
        60.0,
    )  # fmt: skip
    engine = build_engine(config, world, lambda done, total: None)
    assert not engine.recorder.snapshot()["seconds"]  # measuring has left no trace
    assert not np.any(engine.recorder.snapshot()["expert_tokens"])
    assert not any(engine.recorder.snapshot()["all_to_all_bytes"].values())
    layers = [t for i in range(case["layers"]) for t in engine.runner.kv.layer(i)]
    assert not any(tensor.any() for tensor in layers)
    saved: dict[str, np.ndarray] = {"info": np.array(json.dumps(engine.info["overlap"]))}
    modes = [mode for mode in MODES if mode != "sbo" or case["shared"]]
    for mode in modes:
        for tensor in layers:
            tensor.zero_()
        saved[f"logits {mode}"] = logits_of_steps(engine, case["steps"], rank, mode)
    whole = "sbo" if case["shared"] else "off"
    mixed = (Rung(0, "off"), Rung(2, whole), Rung(6, whole, halves=True))
    policies = {mode: forced(mode) for mode in modes}
    for mode, policy in {**policies, "mixed": OverlapPolicy("auto", mixed, "")}.items():
        engine.overlap = policy
        before = dict(engine.overlap_steps)
        saved[f"tokens {mode}"] = tokens_of_requests(engine, case["requests"], rank, mode)
        ran = {m: n - before[m] for m, n in engine.overlap_steps.items()}
        saved[f"ran {mode}"] = np.array([ran[m] for m in MODES])
    np.savez(directory / f"rank{rank}.npz", **saved)
    engine.close()


def logits_of_steps(engine, steps, rank: int, mode: str) -> np.ndarray:
    policy, rows = forced(mode), []
    page = engine.runner.kv.page_size
    for step in steps:
        items = []
        for key, start, tokens, sample in step[rank]:
            base = key * 8
            pages = tuple(range(base, base + -(-(start + len(tokens)) // page)))
            request = Request(str(key), tuple(tokens), SamplingParams(), key=key * 7919 + rank)
            items.append(Scheduled(request, start, tuple(tokens), pages, sample))
        plan = Plan(tuple(items))
        cut = policy.cut(plan)
        agreed = agree(engine.world.lockstep.exchange((1, 0, plan.num_tokens, cut, 1)), policy)
        assert agreed.run and agreed.overlap in (mode, "off")
        with torch.inference_mode():
            hidden = engine.runner.hidden(plan, How(agreed.most_tokens, agreed.overlap, cut))
            rows.append(engine.runner.model.logits(hidden).numpy())
    return np.concatenate(rows)


def tokens_of_requests(engine, requests, rank: int, mode: str) -> np.ndarray:
    """[requests of this rank, tokens]."""
    made: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for i, prompt in enumerate(requests[rank]):
        name = f"{mode} {i}"
        engine.add(Request(name, tuple(prompt), params, key=100 * rank + i))
        made[name] = []
    engine.wake(1)
    while not (step := engine.step()).sleep:
        for output in step.outputs:
            made[output.request_id] += [token.token_id for token in output.tokens]
    return np.array(list(made.values()))


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo aborts now and then when its peers are gone first; the worker does the same
