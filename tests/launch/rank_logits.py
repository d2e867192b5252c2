"""A rank process of test_ranks_logits.py: runs its share of a script and saves every logit.

Arguments: rank, descriptor of the shared memory, JSON job, output file. The job: "config" (fields
of EngineConfig), "prompts" (token lists; of G attention groups each takes every G-th), "chunk"
(tokens of a sequence per step while its prompt lasts), "prefill" (prompt tokens; the rest is fed
one by one), "stagger"; "group_fd", where there is one, memory of attention groups.
"""

import json
import os
import sys
import tempfile

import numpy as np
import torch

from crossdock.comm import build_world
from crossdock.core import EngineConfig, Plan, Request, SamplingParams, Scheduled
from crossdock.engine import build_engine
from crossdock.engine.batch import make_batch
from crossdock.engine.drive import drive

PAGES = 64


def main() -> None:
    rank, fd, job, out = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
    config = EngineConfig(**job["config"])
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as unused:
        rendezvous = job.get("rendezvous", unused.name)
    world = build_world(
        rank,
        config.ranks,
        config.device,
        config.transport,
        {"shm": fd, **({"group": job["group_fd"]} if "group_fd" in job else {})},
        rendezvous,
        config.deadline_s,
        config.tp,
    )
    engine = build_engine(config, world, lambda done, total: None)
    kv = engine.runner.kv
    mine = {i: p for i, p in enumerate(job["prompts"]) if i % config.groups == rank // config.tp}
    at = dict.fromkeys(mine, 0)
    logits: dict[int, list[np.ndarray]] = {i: [] for i in mine}
    step = 0
    while True:
        items = []
        for i, tokens in mine.items():
            start, first = at[i], job["stagger"] * i
            if start == len(tokens) or step < first:
                continue
            count = min(job["chunk"], job["prefill"] - start) if start < job["prefill"] else 1
            chunk = tuple(tokens[start : start + count])
            base = (i // config.groups) * PAGES
            pages = tuple(range(base, base + -(-(start + count) // config.page_size)))
            request = Request(str(i), tuple(tokens), SamplingParams(), key=i * 7919)
            items.append((i, Scheduled(request, start, chunk, pages, sample=True)))
        items.sort(key=lambda pair: len(pair[1].tokens) > 1)
        open_here = any(at[i] < len(t) for i, t in mine.items())
        if not any(row[0] for row in world.lockstep.exchange((int(open_here),))):
            break
        with torch.inference_mode():
            plan = Plan(tuple(item for _, item in items))
            hidden = drive(
                engine.runner.model.forward(make_batch(plan, kv.page_size, world.device), kv)
            )
            rows = engine.runner.model.logits(hidden).cpu().numpy()
        used = 0
        for i, item in items:
            logits[i].append(rows[used : used + len(item.tokens)])
            used += len(item.tokens)
            at[i] += len(item.tokens)
        step += 1
    np.savez(out, **{str(i): np.concatenate(parts) for i, parts in logits.items()})
    engine.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo aborts now and then when its peers are gone first; the worker does the same
