"""A rank of `bench quant`: log-likelihoods of windows of a text, and greedy continuations; started
by `python -m`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossdock.bench.child import answer_requests
from crossdock.bench.rank_world import join
from crossdock.comm import World
from crossdock.core import CapacityError, EngineConfig, Plan, Request, SamplingParams, Scheduled
from crossdock.engine import Engine, build_engine
from crossdock.engine.batch import make_batch
from crossdock.engine.drive import drive


@dataclass(frozen=True, eq=False)
class Rank:
    """`pages`: of each sequence, one after another from page 0."""

    world: World
    engine: Engine
    pages: int

    def logits(self, work: list[tuple[int, int, list[int]]], most_tokens: int) -> Tensor:
        """fp32 [T, V] of what follows the tokens of sequences, `(sequence, start, tokens)` each.
        Collective: ranks without work call it with none. `most_tokens`: of any rank."""
        runner = self.engine.runner
        items = []
        for sequence, start, tokens in work:
            first = sequence * self.pages
            last = first + -(-(start + len(tokens)) // runner.kv.page_size)
            request = Request(str(sequence), tuple(tokens), SamplingParams(), key=sequence * 7919)
            items.append(Scheduled(request, start, tuple(tokens), tuple(range(first, last)), True))
        size, device = runner.kv.page_size, self.world.device
        batch = make_batch(Plan(tuple(items)), size, device, most_tokens)
        return runner.model.logits(drive(runner.model.forward(batch, runner.kv)))


def start(settings: dict[str, Any]) -> tuple[Rank, dict[str, Any]]:
    world = join(settings)
    config = EngineConfig(**settings["config"])
    engine = build_engine(config, world, lambda done, total: None)
    assert config.max_model_len is not None
    pages = -(-config.max_model_len // config.page_size)
    needed = pages * config.page_size * config.max_num_seqs
    if engine.info["kv_tokens"] < needed:
        raise CapacityError(
            f"the KV cache has room for {engine.info['kv_tokens']} tokens, {config.max_num_seqs} "
            f"sequences need {needed}; raise kv_memory_gib, or lower --prompts"
        )
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    told = ("fp8", "weight_bytes", "transport", "kv_bytes", "kv_tokens")
    facts = {"name": device, **{key: engine.info[key] for key in told}}
    return Rank(world, engine, pages), facts


@torch.inference_mode()
def run(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    """Of the windows and prompts whose turn is this rank's."""
    mine = slice(rank.world.rank, None, rank.world.size)
    windows, prompts = request["windows"], request["prompts"]
    scores = _score(rank, windows[mine], request["rounds"], len(windows[0]))
    length, turns = len(prompts[0]), request["turns"]
    greedy = _continue(rank, prompts[mine], turns, length, request["output_len"])
    return {**scores, "greedy": greedy}


def _score(rank: Rank, windows: list[list[int]], rounds: int, most_tokens: int) -> dict[str, Any]:
    """Per window: log-likelihoods of its tokens from the second on, and the likeliest ones."""
    found: dict[str, Any] = {"logprobs": [], "likeliest": []}
    for i in range(rounds):
        work = [(0, 0, windows[i])] if i < len(windows) else []
        logits_TV = rank.logits(work, most_tokens)
        if work:
            next_T = torch.tensor(windows[i][1:], device=logits_TV.device)
            logprobs_TV = logits_TV[:-1].log_softmax(-1)
            found["logprobs"].append(logprobs_TV.gather(1, next_T[:, None])[:, 0].tolist())
            found["likeliest"].append(logits_TV[:-1].argmax(-1).tolist())
    return found


def _continue(
    rank: Rank, prompts: list[list[int]], turns: int, prompt_len: int, output_len: int
) -> list[list[int]]:
    """`output_len` likeliest tokens of each prompt: one prompt after another, then all together."""
    tokens: list[list[int]] = []
    for i in range(turns):
        work = [(i, 0, prompts[i])] if i < len(prompts) else []
        logits_TV = rank.logits(work, prompt_len)
        if work:
            tokens.append([int(logits_TV[-1].argmax())])
    for at in range(output_len - 1):
        work = [(i, prompt_len + at, [tokens[i][-1]]) for i in range(len(prompts))]
        for each, token in zip(tokens, rank.logits(work, turns).argmax(-1).tolist(), strict=True):
            each.append(token)
    return tokens


def stop(rank: Rank) -> None:
    rank.engine.close()


if __name__ == "__main__":
    answer_requests(start, run, stop)
