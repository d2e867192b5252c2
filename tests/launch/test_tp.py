"""Attention groups of several ranks, over real rank processes, with the demo model."""

import os
import random
import signal
from pathlib import Path

import pytest

from crossdock import LLM, SamplingParams
from crossdock.core import CrossdockError, UserError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "The old wolf looked at the moon and", "Far away", "A", "The sea"]


def tokens_of(llm: LLM, prompts, params=GREEDY) -> list[tuple[int, ...]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[int, ...]]:
    model = Path(__file__).parents[2] / "checkpoints" / "storyteller"
    with LLM(str(model), device="cpu") as llm:
        return dict(zip(PROMPTS, tokens_of(llm, PROMPTS), strict=True))


@pytest.fixture(scope="module")
def llm():
    """Two groups of two; an odd budget, so that shares are uneven."""
    model = Path(__file__).parents[2] / "checkpoints" / "storyteller"
    with LLM(str(model), ranks=4, tp=2, device="cpu", max_num_batched_tokens=51) as engine:
        yield engine


def test_greedy_tokens_are_those_of_one_rank(llm: LLM, alone) -> None:
    assert tokens_of(llm, PROMPTS) == list(alone.values())
    for prompt in PROMPTS[:2]:  # one group works, the other has nothing
        assert tokens_of(llm, prompt) == [alone[prompt]]


def test_only_first_ranks_speak_of_requests(llm: LLM) -> None:
    snapshots = llm.client.snapshots(timeout=60)
    assert ["scheduler" in s.values for s in snapshots] == [True, False, True, False]
    before = sum(s.values["scheduler"]["generation_tokens_total"] for s in snapshots[::2])
    tokens_of(llm, PROMPTS)
    after = [s.values for s in llm.client.snapshots(timeout=60)]
    made = sum(v["scheduler"]["generation_tokens_total"] for v in after[::2]) - before
    assert made == len(PROMPTS) * 24
    routed = [sum(map(sum, v["expert_tokens"])) for v in after]
    assert all(routed) and sum(routed) == sum(sum(map(sum, v["slot_tokens"])) for v in after)


def test_many_requests_of_all_sorts_with_aborts_between(llm: LLM) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(4, 4000) for _ in range(draw.randrange(1, 150))] for _ in range(24)]
    params = [
        SamplingParams(temperature=draw.choice([0, 1]), max_tokens=draw.randrange(1, 30), seed=i,
                       ignore_eos=True, presence_penalty=draw.choice([0, 0.5]),
                       logprobs=draw.choice([None, 2]), n=draw.choice([1, 1, 2]))
        for i in range(24)
    ]  # fmt: skip
    for i in range(8):  # these are dropped in the middle and nobody minds
        llm.client.submit(f"drop-{i}", prompts[i], params[i], lambda update: None)
    for i in range(8):
        llm.client.abort(f"drop-{i}")
    outputs = llm.generate(prompts, params)
    for output, p in zip(outputs, params, strict=True):
        assert [len(c.token_ids) for c in output.outputs] == [p.max_tokens] * p.n
        for choice in output.outputs:
            assert (choice.logprobs is None) == (p.logprobs is None)
    running = [s.values["scheduler"] for s in llm.client.snapshots(timeout=60)[::2]]
    assert all(r["num_requests_running"] == r["pages_used"] == 0 for r in running)
    prefix = list(range(100, 180))
    llm.generate([[*prefix, 7]], GREEDY)
    assert llm.generate([[*prefix, 8, 9]], GREEDY)[0].metrics.num_cached_tokens == 80


def test_stop_strings_end_a_request_on_all_ranks_of_its_group(llm: LLM, alone) -> None:
    text = llm.client.tokenizer.decode(list(alone[PROMPTS[0]]))
    params = SamplingParams(temperature=0, max_tokens=200, stop=text[10:16], ignore_eos=True)
    cut = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert cut.text == text[: text.index(text[10:16])]
    assert tokens_of(llm, PROMPTS) == list(alone.values())


def test_idle_ranks_use_no_processor(llm: LLM, idle_ticks) -> None:
    tokens_of(llm, PROMPTS[:1])
    assert idle_ticks(llm.client.pids, 20) <= 20


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 2, "tp": 2, "overlap": "tbo", "transport": "collective"},
        {"ranks": 4, "tp": 4, "replica_choice": "quota", "redundant_experts": 4, "overlap": "sbo",
         "max_dispatch_tokens": 5},
    ],
)  # fmt: skip
def test_beside_other_settings(storyteller: Path, alone, settings) -> None:
    with LLM(str(storyteller), device="cpu", max_num_batched_tokens=33, **settings) as llm:
        assert tokens_of(llm, PROMPTS) == list(alone.values())


def test_preemption_and_a_move_of_experts(storyteller: Path, alone) -> None:
    """KV for one sequence and a little: the last to come gives way, on both ranks alike."""
    settings = {"max_model_len": 64, "page_size": 8, "rebalance": "manual"}
    tiny = 1.3 * 64 * 5 * (64 + 16) * 4 / 2**30
    with LLM(
        str(storyteller), ranks=2, tp=2, device="cpu", kv_memory_gib=tiny,
        redundant_experts=2, **settings,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        prompts = [llm.client.tokenizer.encode(p) for p in PROMPTS]
        assert tokens_of(llm, prompts, params) == list(alone.values())
        rank = llm.client.snapshots(timeout=60)[0].values["scheduler"]
        assert rank["num_preemptions_total"] > 0
        placement = llm.client.placement.slot_expert_LP
        moved = llm.client.rebalance(placement[:, ::-1].copy(), timeout=60)
        assert moved.error is None and moved.layers == len(placement)
        assert tokens_of(llm, prompts, params) == list(alone.values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_of_a_group_is_named(storyteller: Path, how: signal.Signals) -> None:
    llm = LLM(str(storyteller), ranks=2, tp=2, device="cpu", deadline_s=6.0)
    tokens_of(llm, PROMPTS[:1])
    os.kill(llm.client.pids[1], how)
    with pytest.raises(CrossdockError, match="rank 1"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=500, ignore_eos=True))
    llm.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "tp": 2}, "3 ranks are no multiple of tp = 2; set ranks to 2, or tp to 1"),
        ({"ranks": 3, "tp": 3}, "tp must be one of 1, 2, 4, got 3"),
        ({"ranks": 2, "tp": 2, "invariant": True}, "invariant mode needs tp = 1"),
    ],
)
def test_impossible_settings_are_refused(storyteller: Path, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM(str(storyteller), device="cpu", **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_cuda_greedy_tokens_are_those_of_one_cpu_rank(
    storyteller: Path, alone, ranks: int, tp: int
) -> None:
    import torch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    with LLM(str(storyteller), ranks=ranks, tp=tp, device="cuda", dtype="float32") as llm:
        assert tokens_of(llm, PROMPTS) == list(alone.values())
