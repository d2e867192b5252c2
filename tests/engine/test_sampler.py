import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crossdock.core import BROKEN, Request, Sampled, SamplingParams, Scheduled
from crossdock.engine.group import GroupSampler
from crossdock.engine.sampler import Sampler, uniform

EOS = 3


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_item(key=0, prompt=(1, 2), outputs=(), eos=(EOS,), **params):
    p = SamplingParams(**{"max_tokens": None, **params})
    request = Request(f"r{key}", tuple(prompt), p, eos, key)
    start = len(prompt) + len(outputs) - 1
    return Scheduled(
        request=request,
        start=start,
        tokens=(0,),
        pages=(),
        sample=True,
        num_outputs=len(outputs),
        output_ids=tuple(outputs) if p.has_penalties else (),
    )


def sample(logits, items, mask=None):
    return Sampler(logits.shape[1], "cpu").sample(logits, items, mask)


def tokens_of(sampled):
    return [s.token_id for s in sampled]


def adjusted(logits, item, outputs, mask=None):
    """Logits of one row before the temperature, float64, token by token."""
    p, x = item.request.params, logits.astype(np.float64).copy()
    if mask is not None:
        x[~mask] = -np.inf
    if len(outputs) < p.min_tokens:
        x[[*item.request.eos_token_ids, *p.stop_token_ids]] = -np.inf
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in set(item.request.prompt_ids) | set(outputs):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else (x[token] * p.repetition_penalty)
        )
    for token in set(outputs):
        x[token] -= p.frequency_penalty * outputs.count(token) + p.presence_penalty
    return x


def probabilities(x, params):
    """What one row is drawn from, and whether it is clear of rounding at the filters' edges."""
    x = x / params.temperature
    w = np.exp(x - x.max())
    margin = np.inf
    if params.min_p:
        margin = np.abs(w[w < 1] - params.min_p).min()
        w[w < params.min_p] = 0
    order = np.argsort(-w, kind="stable")
    if params.top_k:
        w[order[params.top_k :]] = 0
    if params.top_p < 1:
        sums = np.cumsum(w[order]) / w.sum()
        before = np.concatenate([[0], sums[:-1]])
        margin = min(margin, np.abs(before - params.top_p).min())
        w[order[before >= params.top_p]] = 0
    return w / w.sum(), margin > 1e-5


VARIANTS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.05},
    {"top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.02, "temperature": 1.3},
    {"logit_bias": {4: 5.0, 9: -100.0, 11: 2.5}},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_p": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.9, "top_k": 30},
    {"min_tokens": 60, "stop_token_ids": (5, 6, 7)},
    {"min_tokens": 1, "stop_token_ids": (5,)},
]


def random_row(rng, key, vocab, **params):
    """An item and its outputs, with tokens that repeat."""
    outputs = tuple(rng.randrange(min(vocab, 40)) for _ in range(rng.randint(0, 50)))
    prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 30)))
    return make_item(key, prompt, outputs, **params), outputs


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_every_parameter_against_a_plain_reference(params, vocab):
    rng = random.Random(str(params))
    logits = torch.randn(64, vocab) * 3
    rows = [random_row(rng, rng.getrandbits(60), vocab, **params) for _ in range(64)]
    got = tokens_of(sample(logits, [item for item, _ in rows]))
    checked = 0
    for row, (item, outputs) in enumerate(rows):
        x = adjusted(logits[row].numpy(), item, outputs)
        probs, clear = probabilities(x, item.request.params)
        cdf = np.cumsum(probs)
        u = uniform(item.request.key, len(outputs))
        assert probs[got[row]] > 0 or not clear
        if clear and np.abs(cdf - u).min() > 1e-6:
            assert got[row] == np.searchsorted(cdf, u, side="right")
            checked += 1
    assert checked > 40


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_greedy_after_the_same_adjustments(params):
    params = {**params, "temperature": 0.0}
    rng = random.Random(7)
    logits = torch.randn(32, 60) * 2
    rows = [random_row(rng, n, 60, **params) for n in range(32)]
    got = tokens_of(sample(logits, [item for item, _ in rows]))
    for row, (item, outputs) in enumerate(rows):
        assert got[row] == adjusted(logits[row].numpy(), item, outputs).argmax()


@pytest.mark.parametrize(
    "params", [{"seed": 11}, {"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5}]
)
def test_draws_follow_the_exact_probabilities(params):
    draws, vocab = 20000, 12
    row = torch.randn(1, vocab)
    key = 77
    items = [make_item(key, outputs=(0,) * n, **params) for n in range(draws)]
    counts = np.bincount(tokens_of(sample(row.repeat(draws, 1), items)), minlength=vocab)
    probs, _ = probabilities(row[0].numpy().astype(np.float64), items[0].request.params)
    inside = probs > 0
    assert counts[~inside].sum() == 0
    expected = probs[inside] * draws
    chi2 = ((counts[inside] - expected) ** 2 / expected).sum()
    assert chi2 < 33  # 11 degrees of freedom: p = 0.0005; the draws are always the same


def test_requests_draw_independently():
    rows = 20000
    logits = torch.zeros(rows, 4)
    first = np.array(tokens_of(sample(logits, [make_item(n) for n in range(rows)])))
    second = np.array(tokens_of(sample(logits, [make_item(n, outputs=(0,)) for n in range(rows)])))
    pairs = np.bincount(first * 4 + second, minlength=16)
    assert ((pairs - rows / 16) ** 2 / (rows / 16)).sum() < 40


def test_the_seed_decides_or_else_the_key():
    logits = torch.zeros(200, 1000)

    def draw(key, **params):
        items = [make_item(key, outputs=(0,) * n, **params) for n in range(200)]
        return tokens_of(sample(logits, items))

    assert draw(1, seed=5) == draw(2, seed=5)
    assert draw(1) == draw(1, seed=1)
    different = [draw(1), draw(2), draw(1, seed=5), draw(1, seed=-5), draw(1, seed=2**64 - 1)]
    for one, other in itertools.combinations(different, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 20


def test_uniform_is_splitmix64():
    def splitmix64(state):
        while True:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = state
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            yield z ^ (z >> 31)

    assert next(splitmix64(0)) == 0xE220A8397B1DCDAF  # as published
    for seed in (0, 1, -1, 2**64 - 1, 1234567):
        stream = splitmix64(next(splitmix64(seed % 2**64)))
        for index in range(50):
            u = uniform(seed, index)
            assert int(u * 2**52) == next(stream) >> 12
            assert 0 < u < 1


def test_a_resumed_request_continues_as_if_never_interrupted():
    table = torch.randn(80, 80) * 2
    params = {"seed": 9, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}

    def generate(outputs, until):
        while len(outputs) < until:
            logits = table[outputs[-1] if outputs else 0][None]
            outputs += tokens_of(sample(logits, [make_item(1, (5, 6), outputs, **params)]))
        return outputs

    whole = generate([], 40)
    assert generate(whole[:13], 40) == whole
    assert len(set(whole)) > 10


def as_tensor(result: Sampled):
    entries = [*result.top] + ([result.logprob] if result.logprob else [])
    values = [v for e in entries for v in (e.token_id, e.logprob, e.rank)]
    return torch.tensor([result.token_id, *values], dtype=torch.float64)


def test_a_row_does_not_depend_on_the_others():
    rng = random.Random(1)
    vocab = 777
    variants = [{**v, **extra} for v in VARIANTS for extra in ({}, {"logprobs": 4})]
    variants += [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 20}, {"logprobs": 0}]
    items = [random_row(rng, n, vocab, **v)[0] for n, v in enumerate(variants * 3)]
    order = rng.sample(range(len(items)), len(items))
    items = [items[n] for n in order]
    logits = torch.randn(len(items), vocab) * 3
    together = sample(logits, items)
    for row, item in enumerate(items):
        (alone,) = sample(logits[row : row + 1], [item])
        assert torch.equal(as_tensor(alone), as_tensor(together[row]))
    for _ in range(5):
        some = sorted(rng.sample(range(len(items)), 17))
        for row, result in zip(some, sample(logits[some], [items[r] for r in some]), strict=True):
            assert torch.equal(as_tensor(result), as_tensor(together[row]))


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 100)
    logits[0, [17, 40, 41, 90]] = 2.0
    assert tokens_of(sample(logits, [make_item(temperature=0.0)])) == [17]
    logits = logits.repeat(300, 1)
    for params, kept in [
        ({"top_k": 1}, {17}),
        ({"top_k": 3}, {17, 40, 41}),
        ({"top_k": 6}, {17, 40, 41, 90, 0, 1}),
        ({"top_k": 4, "top_p": 0.4}, {17, 40}),
    ]:
        items = [make_item(n, **params) for n in range(300)]
        assert set(tokens_of(sample(logits, items))) == kept


def test_tiny_temperatures_are_greedy_and_finite():
    logits = torch.randn(50, 64) * 10
    for temperature in (0.0, 1e-30, 1e-6, 1e-4):
        items = [make_item(n, temperature=temperature) for n in range(50)]
        assert tokens_of(sample(logits, items)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3}], ids=str
)
def test_a_mask_is_obeyed(params):
    logits = torch.randn(400, 30)
    mask = torch.rand(400, 30) < 0.2
    mask[:, 29] = True
    items = [make_item(n, **params) for n in range(400)]
    got = torch.tensor(tokens_of(sample(logits, items, mask)))
    assert mask.gather(1, got[:, None]).all()
    if params.get("temperature") == 0:
        assert torch.equal(got, logits.masked_fill(~mask, -torch.inf).argmax(-1))


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"temperature": 0.1}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}],
    ids=str,
)
def test_rows_without_a_choice_still_yield_a_token(params):
    items = [make_item(n, logprobs=3, **params) for n in range(20)]
    nothing = torch.zeros(20, 9, dtype=torch.bool)
    for result in sample(torch.randn(20, 9), items, nothing):
        assert 0 <= result.token_id < 9
        assert torch.isfinite(as_tensor(result)).all()


def test_ids_beyond_the_vocabulary_are_ignored():
    params = {"logit_bias": {99: 50.0}, "stop_token_ids": (99, -4), "min_tokens": 5}
    items = [make_item(n, eos=(200,), **params) for n in range(40)]
    assert max(tokens_of(sample(torch.randn(40, 10), items))) < 10


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_logprobs_are_the_models_own(params):
    rng = random.Random(3)
    logits = torch.randn(20, 40) * 2
    kept = logits.clone()
    items = [random_row(rng, n, 40, **params, logprobs=n % 6)[0] for n in range(20)]
    results = sample(logits, items)
    assert torch.equal(logits, kept)
    exact = logits.double().log_softmax(-1)
    for row, result in enumerate(results):
        by_rank = sorted(range(40), key=lambda t: -exact[row, t].item())
        assert result.logprob.token_id == result.token_id
        assert result.logprob.logprob == pytest.approx(exact[row, result.token_id].item(), abs=1e-5)
        assert by_rank[result.logprob.rank - 1] == result.token_id
        assert [t.token_id for t in result.top] == by_rank[: row % 6]
        assert [t.rank for t in result.top] == list(range(1, row % 6 + 1))
        for top in result.top:
            assert top.logprob == pytest.approx(exact[row, top.token_id].item(), abs=1e-5)


def test_logprobs_only_where_asked():
    logits = torch.randn(3, 10)
    items = [make_item(0), make_item(1, logprobs=0), make_item(2, logprobs=20)]
    none, chosen, all_of_them = sample(logits, items)
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()
    assert len(all_of_them.top) == 10


def test_impossible_tokens_have_finite_logprobs():
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 1.0
    (result,) = sample(logits, [make_item(logprobs=3)])
    assert (result.token_id, result.logprob.logprob, result.logprob.rank) == (2, 0.0, 1)
    assert [t.logprob for t in result.top] == [0.0, -9999.0, -9999.0]


def test_no_rows():
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_rows_that_are_not_finite_are_told_as_broken(params):
    logits = torch.randn(4, 50)
    logits[1] = float("nan")
    logits[3] = float("inf")
    items = [make_item(key, **params) for key in range(4)]
    draw = Sampler(50, "cpu").draw(logits, items)
    assert (draw.ids_B >= 0).all()
    got = draw.read()
    assert [s.token_id == BROKEN for s in got] == [False, True, False, True]
    alone = sample(logits[[0, 2]], [items[0], items[2]])
    assert [got[0], got[2]] == alone


def test_all_of_a_group_are_told_of_broken_rows():
    sent = []
    first = SimpleNamespace(rank=0, broadcast=sent.append)
    logits = torch.randn(3, 50)
    logits[1] = float("nan")
    items = [make_item(key, temperature=0.0) for key in range(3)]
    want = GroupSampler(50, "cpu", first).draw(logits, items)
    other = SimpleNamespace(rank=1, broadcast=lambda told_B: told_B.copy_(sent[0]))
    draw = GroupSampler(50, "cpu", other).draw(torch.empty(0, 50), items)
    assert draw.read() == want.read() and draw.read()[1].token_id == BROKEN
    assert torch.equal(draw.ids_B, want.ids_B) and int(draw.ids_B[1]) == 0


@pytest.mark.gpu
def test_a_gpu_tells_of_broken_rows_and_the_host_does_not_wait():
    logits = torch.randn(9, 5000)
    logits[1], logits[4], logits[7, 1:] = float("nan"), float("inf"), float("nan")
    kinds = (
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 3},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "logprobs": 0},
        {"temperature": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": ((5, 9.0),)},
    )
    items = [make_item(i, outputs=(7,), **kinds[i % 3]) for i in range(9)]
    sampler, there = Sampler(5000, "cuda"), logits.cuda()
    mask = torch.ones(9, 5000, dtype=torch.bool, device="cuda")
    mask[:, 100:] = False
    for given in (None, mask):
        sampler.sample(there, items, given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            draw = sampler.draw(there, items, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        got = draw.read()
        assert [s.token_id == BROKEN for s in got] == [row in (1, 4, 7) for row in range(9)]
        want = sample(logits, items, None if given is None else given.cpu())
        assert tokens_of(got) == tokens_of(want)
        ids = draw.ids_B.tolist()
        assert all(0 <= i < 5000 and i == max(s.token_id, 0) for i, s in zip(ids, got, strict=True))
