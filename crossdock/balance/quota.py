"""UltraEP's planner: each expert stays home, and replicas take quotas of what is over a threshold.

Source: arXiv 2606.04101 and Dots-Infra/UltraEP. Never two copies of an expert on one rank.
"""

from dataclasses import dataclass

import numpy as np

from crossdock.balance.base import Answer, Problem
from crossdock.balance.check import check_problem
from crossdock.balance.homes import Quotas, home_slots, quota_answer, whole_tokens

EPS = 0.01
"""The first threshold is so far above the mean."""
FAST_RETRIES = 4
SMALLEST_QUOTA = 1 / 128
"""Of a rank's mean load, while bisecting; there it is 1,024 tokens whatever the load."""


def quota(problem: Problem) -> Answer:
    """Homes are where the experts are now, or in order where there is no placement; slots that no
    replica needs stay empty.

    Raises:
        ConfigError: an invalid problem.
    """
    check_problem(problem)
    home_LE = home_slots(problem)
    layers = [
        _plan_layer(whole_tokens(load_E), home_E // problem.slots_per_rank, problem)
        for load_E, home_E in zip(problem.load_LE, home_LE, strict=True)
    ]
    return quota_answer(problem, home_LE, layers)


def _plan_layer(load_E: np.ndarray, home_E: np.ndarray, problem: Problem) -> Quotas:
    """The lowest threshold that can be kept: a few close to the mean, then by bisection."""
    ranks = problem.num_ranks
    rank_load_R = np.bincount(home_E, load_E, ranks).astype(np.int64)
    free_R = problem.slots_per_rank - np.bincount(home_E, minlength=ranks)
    layer = _Layer(load_E, home_E, rank_load_R, free_R)
    total, most = int(load_E.sum()), int(rank_load_R.max())
    step = -(-most // 100)
    for retry in range(1 + FAST_RETRIES):
        threshold = int(np.ceil(total / ranks * (1 + EPS))) + retry * step
        if threshold >= most:
            return []
        if (found := layer.keep_below(threshold, 1)) is not None:
            # Ours: what lies between the thresholds tried is not left unused.
            return layer.lowest(threshold - step + 1, threshold, 1, found) if retry else found
    smallest = max(1, int(total / ranks * SMALLEST_QUOTA))
    return layer.lowest(-(-total // ranks), most, smallest, [])


@dataclass(frozen=True, eq=False)
class _Layer:
    """`rank_load_R`: with every expert at home; `free_R`: slots for replicas."""

    load_E: np.ndarray
    home_E: np.ndarray
    rank_load_R: np.ndarray
    free_R: np.ndarray

    def lowest(self, low: int, high: int, smallest: int, at_high: Quotas) -> Quotas:
        """By bisection over thresholds from `low`; `at_high` is what `high` allows."""
        best = at_high
        while low < high:
            middle = (low + high) // 2
            if (found := self.keep_below(middle, smallest)) is None:
                low = middle + 1
            else:
                high, best = middle, found
        return best

    def keep_below(self, threshold: int, smallest: int) -> Quotas | None:
        """Replicas that leave no rank above `threshold`, none smaller than `smallest` tokens;
        None where this greedy way finds none."""
        excess_R = np.maximum(self.rank_load_R - threshold, 0)
        slack_R = np.maximum(threshold - self.rank_load_R, 0)
        if excess_R.sum() > slack_R.sum():
            return None
        free_R = self.free_R.copy()
        quotas = Quotas()
        for source in np.argsort(-self.rank_load_R, kind="stable"):
            need = int(excess_R[source])
            if not need:
                break
            here = np.flatnonzero(self.home_E == source)
            for expert in here[np.argsort(-self.load_E[here], kind="stable")]:
                need -= self._export(int(expert), need, smallest, slack_R, free_R, quotas)
                if need <= 0:
                    break
            if need > 0:
                return None
        return quotas

    def _export(
        self,
        expert: int,
        need: int,
        smallest: int,
        slack_R: np.ndarray,
        free_R: np.ndarray,
        quotas: Quotas,
    ) -> int:
        """Tokens given away; takes them from `slack_R` and `free_R` and notes them."""
        able_R = free_R > 0  # the home has no slack
        given, left = 0, int(self.load_E[expert]) - 1  # the home keeps a token
        while need > given and left > 0:
            open_R = np.where(able_R, slack_R, 0)
            choices = int(np.count_nonzero(open_R))
            if not choices:
                break
            target = int(open_R.argmax())
            tokens = min(max(need - given, smallest), int(open_R[target]), left)
            # A quota below an equal part of the need would take too many replicas.
            if tokens < max(-(-(need - given) // choices), smallest):
                break
            quotas.append((expert, target, tokens))
            able_R[target] = False
            slack_R[target] -= tokens
            free_R[target] -= 1
            given, left = given + tokens, left - tokens
        return given
