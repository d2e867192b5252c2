"""LLEP: the least-loaded ranks take what a rank has above the mean.

Source: arXiv 2601.17111 (SalesforceAIResearch/LeastLoadedEP), algorithms 2 and 3. There a rank may
take any number of foreign experts; here it has slots for them, and what finds none stays at home.
"""

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem
from crossdock.balance.homes import Quotas, home_slots, quota_answer, whole_tokens

SMALLEST_PART = 1 / 64
"""Of a rank's mean load; with `MIN_TOKENS`, whichever is less."""
MIN_TOKENS = 1024


def llep(problem: Problem, *, alpha: float = 1.0, skip_below: float = 1.3) -> Answer:
    """Homes are as in `quota`.

    Args:
        alpha: a rank takes up to alpha times the mean.
        skip_below: of the imbalance with all experts at home, under which nothing is done.

    Raises:
        ConfigError: an invalid problem.
    """
    check_problem(problem)
    home_LE = home_slots(problem)
    layers = []
    for load_E, home_E in zip(problem.load_LE, home_LE, strict=True):
        rank_E = home_E // problem.slots_per_rank
        rank_load_R = np.bincount(rank_E, load_E, problem.num_ranks)
        skip = rank_load_R.max() < skip_below * rank_load_R.mean()
        layers.append([] if skip else _spill(whole_tokens(load_E), rank_E, problem, alpha))
    return quota_answer(problem, home_LE, layers)


def _spill(load_E: np.ndarray, home_E: np.ndarray, problem: Problem, alpha: float) -> Quotas:
    """Experts by falling load: the home keeps what fits below the limit, others take the rest."""
    mean = load_E.sum() / problem.num_ranks
    limit, smallest = alpha * mean, min(MIN_TOKENS, mean * SMALLEST_PART)
    free_R = problem.slots_per_rank - np.bincount(home_E, minlength=problem.num_ranks)
    # Given out and, of the homes, still to come: what a rank can count on having.
    rank_load_R = np.bincount(home_E, load_E, problem.num_ranks)
    quotas: Quotas = []
    for expert in np.argsort(-load_E, kind="stable"):
        home, load = home_E[expert], float(load_E[expert])
        rank_load_R[home] -= load
        kept = min(max(limit - rank_load_R[home], 0.0), load)
        rest = load - kept
        able_R = free_R > 0
        able_R[home] = False
        for rank in np.argsort(rank_load_R, kind="stable"):
            if rest <= 0:
                break
            part = min(rest, limit - rank_load_R[rank])
            if not able_R[rank] or part <= 0 or (part < smallest and rest > part):
                continue
            _give(expert, rank, part, rank_load_R, free_R, quotas)
            able_R[rank] = False
            rest -= part
        if rest > 0 and able_R.any():  # nobody has room: onto the least loaded, unless that is home
            rank = int(np.where(able_R, rank_load_R, np.inf).argmin())
            if rank_load_R[rank] < rank_load_R[home] + kept:
                _give(expert, rank, rest, rank_load_R, free_R, quotas)
                rest = 0.0
        rank_load_R[home] += kept + rest
    return quotas


def _give(
    expert: int,
    rank: int,
    tokens: float,
    rank_load_R: np.ndarray,
    free_R: np.ndarray,
    quotas: Quotas,
) -> None:
    quotas.append((int(expert), int(rank), tokens))
    rank_load_R[rank] += tokens
    free_R[rank] -= 1
