"""Which rank's experts a step's tokens reach, and what the balance policies make of it."""

import numpy as np

from crossdock.balance import Answer, Problem, imbalance, linear_placement
from crossdock.core import ConfigError
from crossdock.planner.simulate.config import ExpertLoads, Rebalance

DRAWN_LAYERS = 256
"""Layers drawn per placement, window and size of step, in draws of all layers; every step of about
that size takes one of these."""


def loads_from_counts(
    load_WLE: np.ndarray, top_k: int, window_s: float = float("inf")
) -> ExpertLoads:
    """Measured token counts `[W, L, E]` or `[L, E]` as inclusion probabilities.

    Raises:
        ConfigError: a layer without tokens, or one whose hottest expert has more than a token each.
    """
    load = np.asarray(load_WLE, dtype=float)
    load = load[None] if load.ndim == 2 else load
    if load.ndim != 3 or (load < 0).any() or not (load.sum(-1) > 0).all():
        raise ConfigError(
            "expert loads: expected counts [layers, experts] of at least 0, none all 0"
        )
    inclusion = top_k * load / load.sum(-1, keepdims=True)
    if inclusion.max() > 1 + 1e-9:
        raise ConfigError(
            f"expert loads: an expert has {inclusion.max() / top_k:.1%} of its layer's load; with "
            f"top-{top_k} routing {1 / top_k:.1%} is the most"
        )
    return ExpertLoads(np.minimum(inclusion, 1.0), window_s)


def zipf_loads(
    layers: int,
    experts: int,
    top_k: int,
    zipf: float,
    *,
    seed: int = 0,
    windows: int = 1,
    window_s: float = float("inf"),
    drift: float = 0.0,
) -> ExpertLoads:
    """Popularities i**-zipf in an order of each layer's own. From one window to the next a share
    `drift` of the experts exchange theirs."""
    rng = np.random.default_rng(seed)
    row_E = inclusion_of(np.arange(1, experts + 1) ** -zipf, top_k)
    now_LE = np.stack([rng.permutation(row_E) for _ in range(layers)])
    result = [now_LE]
    for _ in range(windows - 1):
        now_LE = now_LE.copy()
        for row in now_LE:
            chosen = rng.permutation(experts)[: round(drift * experts)]
            row[chosen] = rng.permutation(row[chosen])
        result.append(now_LE)
    return ExpertLoads(np.stack(result), window_s)


def inclusion_of(weight_E: np.ndarray, top_k: int) -> np.ndarray:
    """1 - exp(-c w), c such that they sum to top_k: how probably each of E experts is among k
    drawn without replacement by weight (the usual exponential-clock approximation)."""
    if not 1 <= top_k <= len(weight_E):
        raise ConfigError(f"top_k {top_k}: expected 1 to {len(weight_E)} experts")
    if top_k == len(weight_E):
        return np.ones(len(weight_E))
    low, high = 0.0, 1.0
    while -np.expm1(-high * weight_E).sum() < top_k:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        short = -np.expm1(-middle * weight_E).sum() < top_k
        low, high = (middle, high) if short else (low, middle)
    return np.asarray(-np.expm1(-high * weight_E))


class ExpertState:
    """The experts of one instance over time: its placement, the loads' window, the next change.

    Args:
        slots: physical slots of a rank.
    """

    def __init__(
        self,
        loads: ExpertLoads,
        ranks: int,
        slots: int,
        rebalance: Rebalance | None,
        rng: np.random.Generator,
    ):
        _, layers, experts = loads.inclusion_WLE.shape
        self._loads = loads
        self._ranks = ranks
        self._slots = slots
        self._rebalance = rebalance
        self._rng = rng
        first = linear_placement(layers, experts, ranks, ranks * slots - experts)
        self._answer = Answer(first.slot_expert_LP)
        self._draws = max(4, -(-DRAWN_LAYERS // layers))
        self._drawn: dict[tuple[int, int], np.ndarray] = {}
        self._seen_LE = np.zeros((layers, experts))
        self._next = rebalance.interval_s if rebalance else float("inf")
        self._coming: tuple[float, Answer] | None = None
        self.rebalances = 0
        self.moved_bytes = 0

    def step(self, now: float, tokens: int) -> float:
        """Rows of the fullest rank over the mean, averaged over the layers (as their times add up),
        in a step with `tokens` (of all ranks) that begins at `now`."""
        if now >= self._next:
            self._plan(now)
        if self._coming is not None and now >= self._coming[0]:
            self._answer = self._coming[1]
            self._coming = None
            self._drawn.clear()
        if tokens == 0:
            return 1.0
        last = len(self._loads.inclusion_WLE) - 1
        window = min(int(now / self._loads.window_s), last)
        if self._rebalance is not None:
            self._seen_LE += tokens * self._loads.inclusion_WLE[window]
        size = round(2 * np.log2(tokens))
        key = window, size
        if key not in self._drawn:
            self._drawn[key] = self._draw(window, round(2 ** (size / 2)))
        return float(self._drawn[key][self._rng.integers(self._draws)])

    def _draw(self, window: int, tokens: int) -> np.ndarray:
        inclusion_LE = self._loads.inclusion_WLE[window]
        draws = [self._rng.binomial(tokens, inclusion_LE) for _ in range(self._draws)]
        return np.array(
            [imbalance(count_LE, self._answer, self._ranks).mean() for count_LE in draws]
        )

    def _plan(self, now: float) -> None:
        rebalance = self._rebalance
        assert rebalance is not None
        while self._next <= now:
            self._next += rebalance.interval_s
        if self._coming is not None or not self._seen_LE.any():
            return
        answer = rebalance.policy(
            Problem(
                self._seen_LE,
                self._ranks,
                self._slots,
                rebalance.num_nodes,
                rebalance.num_groups,
                self._answer.slot_expert_LP,
                rebalance.expert_bytes,
            )
        )
        moves_R = moves_into(self._answer.slot_expert_LP, answer.slot_expert_LP, self._ranks)
        seconds = moves_R.max() * rebalance.expert_bytes / rebalance.bytes_per_s
        self._coming = now + seconds, answer
        self._seen_LE = np.zeros_like(self._seen_LE)
        self.rebalances += 1
        self.moved_bytes += int(moves_R.sum()) * rebalance.expert_bytes


def moves_into(old_LP: np.ndarray, new_LP: np.ndarray, ranks: int) -> np.ndarray:
    """Experts `[R]`, over all layers, that a rank holds in `new_LP` and not in `old_LP`."""
    old_LRS, new_LRS = (p.reshape(len(p), ranks, -1) for p in (old_LP, new_LP))
    here_LRS = (new_LRS[..., :, None] == old_LRS[..., None, :]).any(-1)
    first_LRS = np.ones_like(here_LRS)
    for s in range(1, new_LRS.shape[-1]):
        first_LRS[..., s] = ~(new_LRS[..., :s] == new_LRS[..., s, None]).any(-1)
    return np.asarray(((new_LRS >= 0) & ~here_LRS & first_LRS).sum((0, 2)))
