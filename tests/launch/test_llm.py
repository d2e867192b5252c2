"""The Python face over real rank processes, with the demo model."""

import gc
import os
import random
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossdock import LLM, SamplingParams
from crossdock.core import CrossdockError, EngineConfig, RequestError, UserError
from crossdock.launch import launch

GREEDY = SamplingParams(temperature=0, max_tokens=24)
DEADLINE_S = 6.0
"""Of a rank that is stopped: longer than a loaded machine may keep the others from running."""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest):
    model = Path(__file__).parents[2] / "checkpoints" / "storyteller"
    with LLM(str(model), ranks=4, device="cpu", max_num_batched_tokens=256) as engine:
        yield engine
        pids = engine.client.pids
    assert alive(pids) == []


def test_without_parameters_the_models_own_are_taken(llm: LLM, monkeypatch) -> None:
    assert llm.client.sampling_defaults == {"temperature": 0.8, "top_p": 0.95}  # of its file
    monkeypatch.setattr(llm.client, "sampling_defaults", {"temperature": 0.0})
    (own,) = llm.generate("Once upon a time")
    (asked,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0))
    assert own.outputs[0].token_ids == asked.outputs[0].token_ids


def test_a_prompt_is_a_text_or_ids_of_any_kind(llm: LLM) -> None:
    want = llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids
    for prompts in ([5, 6], (5, 6), np.array([5, 6]), [np.array([5, 6])], [(5, 6)]):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.outputs[0].token_ids == want
    for wrong in (None, [None], b"abc", {"a": 1}, [["a"]], [[1.5]]):
        with pytest.raises(RequestError):
            llm.generate(wrong, GREEDY)
    for params in ({"max_tokens": 2}, 5, [None], "x"):
        with pytest.raises(RequestError, match="expected SamplingParams"):
            llm.generate(["a"], params)


def test_chat_gives_the_template_what_it_is_given(llm: LLM) -> None:
    asked = [{"role": "user", "content": "a wolf"}], SamplingParams(max_tokens=1)
    (output,) = llm.chat(*asked, {"bos_token": "Once "})
    want = llm.client.tokenizer.encode("Once a wolf", add_special_tokens=False)
    assert output.prompt_token_ids == tuple(want)


def test_greedy_text_agrees_with_transformers_on_four_ranks(llm: LLM, storyteller: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(storyteller, dtype=torch.float32)
    prompts = ["Once upon a time", "The old wolf looked at the moon and", "Far away in the north"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        want = reference.generate(
            ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :]
        assert output.outputs[0].token_ids == tuple(want.tolist())
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == llm.client.tokenizer.decode(want.tolist())


def test_n_seeds_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12, logprobs=2)
    one, two = (llm.generate("The princess", params)[0] for _ in range(2))
    texts = [c.text for c in one.outputs]
    assert texts == [c.text for c in two.outputs] and len(set(texts)) > 1
    for choice in one.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            assert entry.token_id == token_id and entry.logprob <= 0 and len(entry.top) == 2
            assert entry.top[0].logprob >= entry.top[1].logprob
    assert llm.generate("The princess", GREEDY)[0].outputs[0].logprobs is None


def test_stop_strings_end_the_text_and_free_the_rank(llm: LLM) -> None:
    free = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    stop = free[10:16]
    params = SamplingParams(temperature=0, max_tokens=24, stop=stop)
    cut = llm.generate("Once upon a time", params)[0].outputs[0]
    assert cut.text == free[: free.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    token = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(token,))
    cut = llm.generate("Once upon a time", params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert all(s.values["scheduler"]["num_requests_running"] == 0 for s in llm.client.snapshots(60))


def test_bad_prompts_and_params_start_nothing(llm: LLM) -> None:
    for prompt, params, param in (
        ([], GREEDY, "prompt"),
        ([0, 5000], GREEDY, "prompt"),
        ([5] * 1020, GREEDY, "max_tokens"),
        ([5] * 5, SamplingParams(logit_bias={9999: 1.0}), "logit_bias"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate([prompt], params)
        assert caught.value.param == param
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.client.num_open() == 0
    assert llm.generate("And then", GREEDY)[0].outputs[0].text


def test_many_requests_of_all_sorts_with_aborts_between(llm: LLM) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(4, 4000) for _ in range(draw.randrange(1, 300))] for _ in range(40)]
    params = [
        SamplingParams(temperature=draw.choice([0, 1]), max_tokens=draw.randrange(1, 40),
                       ignore_eos=True, seed=i, presence_penalty=draw.choice([0, 0.5]))
        for i in range(40)
    ]  # fmt: skip
    for i in range(6):  # these are dropped in the middle and nobody minds
        llm.client.submit(f"drop-{i}", prompts[i], params[i], lambda update: None)
    for i in range(6):
        llm.client.abort(f"drop-{i}")
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    ranks = llm.client.snapshots(60)
    assert all(s.values["scheduler"]["num_requests_running"] == 0 for s in ranks)
    experts = [sum(map(sum, s.values["expert_tokens"])) for s in ranks]
    slots = [sum(map(sum, s.values["slot_tokens"])) for s in ranks]
    assert sum(experts) == sum(slots) > 0  # every choice was run exactly once somewhere


def test_ranks_count_the_tokens_of_their_steps_together(llm: LLM) -> None:
    def told() -> list[float]:
        return [s.values["histograms"]["iteration_tokens"]["sum"] for s in llm.client.snapshots(60)]

    before = told()
    prompts = [[4 + i] * (10 + i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate(prompts, params)
    computed = sum(len(prompt) + 4 for prompt in prompts)  # a last token is not computed
    assert [b - a for a, b in zip(before, told(), strict=True)] == [computed] * 4


def test_shared_prefixes_are_cached_on_one_rank(llm: LLM) -> None:
    prefix = list(range(100, 180))
    llm.generate([[*prefix, 7]], GREEDY)
    again = llm.generate([[*prefix, 8, 9]], GREEDY)[0]
    assert again.metrics.num_cached_tokens == 80


def test_nothing_is_left_of_an_engine_that_was_closed(storyteller: Path) -> None:
    with LLM(str(storyteller), device="cpu") as engine:
        client = weakref.ref(engine.client)
    del engine
    gc.collect()
    end = time.monotonic() + 60  # its threads end a moment after it
    while client() is not None and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
    assert client() is None


def test_idle_ranks_use_no_processor(llm: LLM, idle_ticks) -> None:
    llm.generate("The end", GREEDY)
    assert idle_ticks(llm.client.pids, 20) <= 20


def test_prefix_hits_preemption_and_budgets_do_not_change_invariant_tokens(
    storyteller: Path,
) -> None:
    """Each request alone on one rank against all of them mixed on four: tiny KV, two budgets."""
    _compare_alone_and_mixed(storyteller, 4, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nor_do_they_on_gpus(storyteller: Path, dtype: str) -> None:
    """On as many as two."""
    import torch

    ranks = min(2, torch.cuda.device_count())
    _compare_alone_and_mixed(storyteller, ranks, device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_nor_do_they_over_nvlink(model: str) -> None:
    """Real widths, whose rows travel by the kernels; random weights."""
    import torch

    ranks = min(2, torch.cuda.device_count())
    _compare_alone_and_mixed(Path(model), ranks, device="cuda", load="dummy", layers=2)


def _compare_alone_and_mixed(model: Path, ranks: int, **more: Any) -> None:
    draw = random.Random(5)
    shared = [draw.randrange(4, 4000) for _ in range(40)]
    prompts = [
        (shared if i % 2 else []) + [draw.randrange(4, 4000) for _ in range(draw.randrange(1, 60))]
        for i in range(10)
    ]
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=20, logprobs=3, ignore_eos=True)
    settings = {"invariant": True, "max_model_len": 128, "page_size": 8, **more}
    with LLM(str(model), ranks=1, **settings) as llm:
        alone = [llm.generate([p], params)[0].outputs[0] for p in prompts]
    preemptions = 0
    for budget in (24, 100):
        kept = llm.client.spec.kv_bytes_per_token(llm.client.info[0]["dtype"])
        tiny = 1.05 * 128 * kept / 2**30
        with LLM(
            str(model), ranks=ranks, kv_memory_gib=tiny, max_num_batched_tokens=budget, **settings
        ) as mixed:
            together = [o.outputs[0] for o in mixed.generate(prompts, params)]
            for snapshot in mixed.client.snapshots(60):
                preemptions += snapshot.values["scheduler"]["num_preemptions_total"]
        assert together == alone
    assert preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_cuda_greedy_tokens_equal_the_cpus(storyteller: Path, ranks: int) -> None:
    import torch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 4000) for _ in range(draw.randrange(1, 200))] for _ in range(16)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(storyteller), ranks=1, device="cpu") as cpu:
        want = [o.outputs[0].token_ids for o in cpu.generate(prompts, params)]
    with LLM(str(storyteller), ranks=ranks, device="cuda", dtype="float32") as cuda:
        got = [o.outputs[0].token_ids for o in cuda.generate(prompts, params)]
    assert got == want


def wait_for_failure(llm: LLM, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while llm.client.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert llm.client.failure is not None
    return llm.client.failure


def test_a_stopped_rank_is_named_after_the_deadline(storyteller: Path) -> None:
    llm = LLM(str(storyteller), ranks=3, deadline_s=DEADLINE_S)
    pids = llm.client.pids
    llm.generate("Once", GREEDY)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(CrossdockError, match="rank 1, last seen in"):
        llm.generate(["Once"] * 4, GREEDY)
    with pytest.raises(CrossdockError, match="rank 1"):
        llm.generate("Once", GREEDY)
    llm.close()
    assert alive(pids) == []


def test_a_rank_stopped_while_it_loads_is_named(storyteller: Path) -> None:
    stopped, over = threading.Event(), threading.Event()

    def stop(rank: int, done: int, total: int) -> None:
        if rank == 1 and not stopped.is_set():
            stopped.set()
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGSTOP)
            over.wait()  # whatever else it had said is not heard

    # Nor does the other rank miss it: without overlap to measure they exchange nothing.
    settings = {"device": "cpu", "overlap": "off", "deadline_s": DEADLINE_S}
    config = EngineConfig(model=str(storyteller), ranks=2, **settings)
    try:
        with pytest.raises(CrossdockError, match="lost while loading: rank 1"):
            launch(config, stop)
    finally:
        over.set()


def test_a_stopped_rank_is_noticed_by_the_gateway(storyteller: Path) -> None:
    """A lone rank: no other one waits for it."""
    with LLM(str(storyteller), ranks=1, device="cpu", deadline_s=DEADLINE_S) as llm:
        os.kill(llm.client.pids[0], signal.SIGSTOP)
        with pytest.raises(CrossdockError, match=r"lost: rank 0, last seen in idle.*stopped"):
            llm.generate("Once", GREEDY)


def test_a_killed_rank_is_named_at_once(storyteller: Path) -> None:
    llm = LLM(str(storyteller), ranks=2)  # the deadline is a minute
    os.kill(llm.client.pids[1], signal.SIGKILL)
    assert "rank 1 ended (killed by signal 9)" in wait_for_failure(llm, 60)
    llm.close()
    assert alive(llm.client.pids) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "redundant_experts": 0}, "nearest values that work: 1"),
        ({"ranks": 40, "redundant_experts": 0}, "more ranks than slots"),
        ({"max_model_len": 5000}, "more than the model's"),
        ({"kv_memory_gib": 0.0001}, "raise kv_memory_gib to at least"),
        ({"ranks": 2, "transport": "local"}, "serves one rank"),
        ({"threads": 2, "invariant": True}, "threads = 1"),
        ({"rank": 4}, r"unknown setting rank \(did you mean ranks\?\); known settings: att"),
        ({"port": 80}, "unknown setting port; known settings: "),
    ],
)
def test_impossible_settings_are_refused_with_the_numbers(
    storyteller: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        LLM(str(storyteller), **settings)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_one_clear_error(storyteller: Path, tmp_path: Path) -> None:
    for file in storyteller.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        LLM(str(tmp_path), ranks=2)


def test_three_ranks_and_collective_agree_with_one(storyteller: Path) -> None:
    """11 slots a rank, one of them a replica; over gloo."""
    with LLM(str(storyteller), ranks=1) as one:
        want = one.generate(["Once upon a time", "The sea"], GREEDY)
    with LLM(str(storyteller), ranks=3, transport="collective") as three:
        assert three.client.info[0]["slots"] == 11
        got = three.generate(["Once upon a time", "The sea"], GREEDY)
    assert [o.outputs for o in got] == [o.outputs for o in want]
