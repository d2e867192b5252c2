"""Which copy serves a token, in one step: balance and locality of each `replica_choice`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from crossdock.balance import POLICIES, Problem, imbalance_of
from crossdock.balance.generate import draw_loads, zipf_weights
from crossdock.balance.reroute import fill_quotas, reroute_quotas
from crossdock.bench.report import Case, case_of

EXPERTS, REDUNDANT, TOP_K, RATIO = 256, 2, 8, 2.0
SEED = 33

Choice = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""(tokens_RE, slot_expert_P, rng) to `sent_RP`: each rank's tokens to each slot."""


def replica_choices(ranks: int, seeds: int, tokens: int) -> list[Case]:
    """A step of `tokens` a rank, whose experts have the popularity that eplb placed copies for, a
    placement a seed."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CHOICES}
    for seed in range(SEED, SEED + seeds):
        rng = np.random.default_rng(seed)
        weight_E = zipf_weights(EXPERTS, ranks, TOP_K, RATIO, rng)
        planned_E = draw_loads(weight_E, 2048 * ranks, TOP_K, rng)
        problem = Problem(planned_E[None], ranks, EXPERTS // ranks + REDUNDANT)
        (row_P,) = POLICIES["eplb"](problem).slot_expert_LP
        tokens_RE = np.array([draw_loads(weight_E, tokens, TOP_K, rng) for _ in range(ranks)])
        for name, choose in CHOICES.items():
            sent_RRS = choose(tokens_RE, row_P, rng).reshape(ranks, ranks, -1)
            even = imbalance_of(sent_RRS.sum(axis=(0, 2))[None])[0]
            at_home = np.einsum("rrs->", sent_RRS) / tokens_RE.sum()
            found[name].append((float(even), float(at_home)))
    cases = []
    for name, values in found.items():
        shape = {"ranks": ranks, "tokens": tokens, "choice": name}
        even, home = np.array(values).T
        case = case_of("choice_imbalance", even.tolist(), "max/mean", "lower", shape)
        more = {"figure": "mean", "on_own_rank": float(home.mean())}
        cases.append(replace(case, median=float(even.mean()), more=more))
    return cases


def _hash(tokens_RE: np.ndarray, row_P: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A good hash is as a draw."""
    sent_RP = np.zeros((len(tokens_RE), len(row_P)), dtype=np.int64)
    for expert in range(tokens_RE.shape[1]):
        slots = np.flatnonzero(row_P == expert)
        sent_RP[:, slots] = rng.multinomial(
            tokens_RE[:, expert], np.full(len(slots), 1 / len(slots))
        )
    return sent_RP


def _nearest(tokens_RE: np.ndarray, row_P: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All ranks on one node."""
    sent_RP = _hash(tokens_RE, row_P, rng)
    for rank, here_S in enumerate(row_P.reshape(len(tokens_RE), -1)):
        for expert in np.unique(here_S[here_S >= 0]):
            sent_RP[rank, row_P == expert] = 0
            first = rank * len(here_S) + int(np.argmax(here_S == expert))
            sent_RP[rank, first] = tokens_RE[rank, expert]
    return sent_RP


def _quota(tokens_RE: np.ndarray, row_P: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    quota_P = fill_quotas(tokens_RE.sum(axis=0), row_P, len(tokens_RE))
    return reroute_quotas(tokens_RE, row_P, quota_P)


CHOICES: dict[str, Choice] = {"hash": _hash, "nearest": _nearest, "quota": _quota}
