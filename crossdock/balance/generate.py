"""Expert loads as UltraEP's tests make them, for benchmarks and tests of planners.

Source: Dots-Infra/UltraEP, `tests/utils.py`, as described: weights are a Zipf law over ranks
times one over the experts of a rank; every token takes the top k of a race by these weights.
"""

import numpy as np

LOCAL_ZIPF = 4.0
CHUNK = 1 << 22
"""Random numbers drawn at once."""


def zipf_weights(
    num_experts: int, num_ranks: int, top_k: int, ratio: float, rng: np.random.Generator
) -> np.ndarray:
    """`weight_E`: such that with experts in order the fullest rank has about `ratio` times the
    mean load. Ranks, and the experts in each, are shuffled.

    Raises:
        ValueError: a ratio that no exponent reaches.
    """
    per_rank = num_experts // num_ranks
    local = np.arange(1, per_rank + 1, dtype=float) ** -LOCAL_ZIPF

    def weights(exponent: float) -> np.ndarray:
        rank = np.arange(1, num_ranks + 1, dtype=float) ** -exponent
        return np.outer(rank, local)

    low, high = 0.0, 16.0
    if not rank_ratio(weights(low), top_k) <= ratio <= rank_ratio(weights(high), top_k):
        raise ValueError(f"ratio {ratio} cannot be reached with {num_ranks} ranks, top {top_k}")
    for _ in range(50):
        middle = (low + high) / 2
        if rank_ratio(weights(middle), top_k) < ratio:
            low = middle
        else:
            high = middle
    weight_RE = rng.permutation(weights(low))
    return rng.permuted(weight_RE, axis=1).ravel()


def rank_ratio(weight_RE: np.ndarray, top_k: int) -> float:
    """Fullest rank over the mean, if an expert is among a token's top k with 1 - exp(-c w)."""
    low, high = 0.0, 1.0
    while (1 - np.exp(-high * weight_RE)).sum() < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if (1 - np.exp(-middle * weight_RE)).sum() < top_k:
            low = middle
        else:
            high = middle
    load_R = (1 - np.exp(-high * weight_RE)).sum(axis=1)
    return float(load_R.max() / load_R.mean())


def draw_loads(
    weight_E: np.ndarray, num_tokens: int, top_k: int, rng: np.random.Generator
) -> np.ndarray:
    """`load_E` int64: each token takes the k experts that come first in a race with exponential
    times, which is the top k by Gumbel noise added to the log weights."""
    load_E = np.zeros(len(weight_E), dtype=np.int64)
    step = max(1, CHUNK // len(weight_E))
    inverse_E = (1 / weight_E).astype(np.float32)
    for start in range(0, num_tokens, step):
        tokens = min(step, num_tokens - start)
        time_TE = rng.standard_exponential((tokens, len(weight_E)), dtype=np.float32)
        time_TE *= inverse_E
        first_TK = np.argpartition(time_TE, top_k - 1, axis=1)[:, :top_k]
        load_E += np.bincount(first_TK.ravel(), minlength=len(weight_E))
    return load_E
