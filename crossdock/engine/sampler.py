"""From logits to tokens. Knows nothing of the model, and keeps nothing between steps.

A row's result depends on its own logits, parameters, tokens so far and (seed, output index) alone:
not on the other rows, so a batch may be cut in any way, and not on where the earlier tokens were
sampled, so a request can be resumed anywhere.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from crossdock.core import Sampled, Scheduled, TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures under this mean argmax; dividing by them would overflow."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity and NaN, which JSON lacks."""


class Sampler:
    """Order of things, as in vLLM: mask, min_tokens, logit_bias, penalties, temperature, min-p,
    top-k, top-p, draw. Ties go to the lowest token id throughout."""

    def __init__(self, vocab_size: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    @torch.inference_mode()
    def sample(
        self, logits_BV: Tensor, items: Sequence[Scheduled], mask: Tensor | None = None
    ) -> list[Sampled]:
        """One token for each item, all of which sample.

        Args:
            logits_BV: float32, left as it is.
            mask: bool [B, V], False where a token is not allowed. A row that allows nothing yields
                some token, never an error.
        """
        if not items:
            return []
        x_BV = self._adjust(logits_BV, items, mask)
        ids_B = self._choose(x_BV, items)
        tokens = ids_B.tolist()
        rows = [r for r, item in enumerate(items) if item.request.params.logprobs is not None]
        sampled = [Sampled(token) for token in tokens]
        for row, result in zip(rows, self._logprobs(logits_BV, ids_B, items, rows), strict=True):
            sampled[row] = result
        return sampled

    def _adjust(self, logits_BV: Tensor, items: Sequence[Scheduled], mask: Tensor | None) -> Tensor:
        """After mask, min_tokens, logit_bias and penalties; the same tensor if none apply."""
        banned: list[tuple[int, int]] = []
        biased: list[tuple[int, int, float]] = []
        penalised: list[int] = []
        for row, item in enumerate(items):
            params = item.request.params
            if item.num_outputs < params.min_tokens:
                stops = {*params.stop_token_ids, *item.request.eos_token_ids}
                banned += [(row, t) for t in stops if 0 <= t < self.vocab_size]
            if params.logit_bias:
                biased += [(row, t, b) for t, b in params.logit_bias if 0 <= t < self.vocab_size]
            if params.has_penalties:
                penalised.append(row)
        if mask is None and not (banned or biased or penalised):
            return logits_BV
        x_BV = logits_BV.clone(memory_format=torch.contiguous_format)
        if mask is not None:
            x_BV.masked_fill_(~mask, -math.inf)
        if banned:
            rows, ids = self._tensor(banned, torch.int64).unbind(1)
            x_BV[rows, ids] = -math.inf
        if biased:
            rows, ids = self._tensor([b[:2] for b in biased], torch.int64).unbind(1)
            bias = self._tensor([b[2] for b in biased], torch.float32)
            x_BV.index_put_((rows, ids), bias, accumulate=True)
        if penalised:
            self._penalise(x_BV, items, penalised)
        return x_BV

    def _penalise(self, x_BV: Tensor, items: Sequence[Scheduled], rows: list[int]) -> None:
        """Repetition over prompt and outputs first, then presence and frequency over outputs.

        Costs by the number of tokens, not of the vocabulary: a token that came twice is written
        twice with the same value.
        """
        flat = x_BV.view(-1)
        params = [items[row].request.params for row in rows]
        outputs = [items[row].output_ids for row in rows]
        seen = [items[row].request.prompt_ids + items[row].output_ids for row in rows]
        at = self._flat_ids(rows, seen)
        penalty = self._per_token([p.repetition_penalty for p in params], seen)
        old = flat[at]
        flat[at] = torch.where(old > 0, old / penalty, old * penalty)
        at = self._flat_ids(rows, outputs)
        flat[at] = flat[at] - self._per_token([p.presence_penalty for p in params], outputs)
        flat.index_add_(0, at, -self._per_token([p.frequency_penalty for p in params], outputs))

    def _flat_ids(self, rows: list[int], ids: list[tuple[int, ...]]) -> Tensor:
        starts = self._per_token([row * self.vocab_size for row in rows], ids, torch.int64)
        return starts + self._tensor(list(chain.from_iterable(ids)), torch.int64)

    def _per_token(
        self, values: list, ids: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        lengths = self._tensor([len(row) for row in ids], torch.int64)
        return self._tensor(values, dtype).repeat_interleave(lengths)

    def _choose(self, x_BV: Tensor, items: Sequence[Scheduled]) -> Tensor:
        drawn = [r for r, i in enumerate(items) if i.request.params.temperature >= GREEDY_BELOW]
        if len(drawn) == len(items):
            return self._draw(x_BV, items)
        ids_B = x_BV.argmax(-1)
        if drawn:
            rows = self._tensor(drawn, torch.int64)
            ids_B[rows] = self._draw(x_BV[rows], [items[row] for row in drawn])
        return ids_B

    def _draw(self, x_BV: Tensor, items: Sequence[Scheduled]) -> Tensor:
        """One uniform number per row through the inverse of the cumulative weights, tokens in order
        of their ids. Filters set weights to 0 and leave the rest as they are."""
        params = [item.request.params for item in items]
        x_BV = x_BV / self._tensor([[p.temperature] for p in params], torch.float32)
        w_BV = x_BV.softmax(-1)
        if any(p.min_p > 0 for p in params):
            min_p_B1 = self._tensor([[p.min_p] for p in params], torch.float32)
            w_BV *= w_BV >= min_p_B1 * w_BV.amax(-1, keepdim=True)
        cut = [r for r, p in enumerate(params) if 0 < p.top_k < self.vocab_size or p.top_p < 1]
        if len(cut) == len(items):
            w_BV *= self._most_likely(w_BV, items)
        elif cut:
            rows = self._tensor(cut, torch.int64)
            w_bV = w_BV[rows]
            w_BV[rows] = w_bV * self._most_likely(w_bV, [items[row] for row in cut])
        # float64: rounding in a parallel scan must not make room for a token of weight 0.
        cdf_BV = w_BV.cumsum(-1, dtype=torch.float64)
        total_B1 = cdf_BV[:, -1:]
        draws = [
            [uniform(i.request.key if p.seed is None else p.seed, i.num_outputs)]
            for i, p in zip(items, params, strict=True)
        ]
        target_B1 = self._tensor(draws, torch.float64) * total_B1
        target_B1 = torch.minimum(target_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
        ids_B = torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0]
        return ids_B.clamp_(
            max=self.vocab_size - 1
        )  # NaN: nothing was allowed, or the logits are broken

    def _most_likely(self, w_BV: Tensor, items: Sequence[Scheduled]) -> Tensor:
        """bool [B, V]: what top-k keeps, and top-p of that."""
        V = self.vocab_size
        params = [item.request.params for item in items]
        k_B1 = self._tensor([[min(p.top_k or V, V)] for p in params], torch.int64)
        # Where top-p is off, no rounding of the sums may cut the tail.
        p_B1 = self._tensor([[p.top_p if p.top_p < 1 else 2.0] for p in params], torch.float64)
        sorted_BV = _descending(w_BV)
        in_k_BV = torch.arange(V, device=self.device) < k_B1
        sums_BV = (sorted_BV * in_k_BV).cumsum(-1, dtype=torch.float64)
        # A token stays while those before it have not reached p of the whole.
        reached_B1 = (sums_BV < p_B1 * sums_BV[:, -1:]).sum(-1, keepdim=True) + 1
        count_B1 = torch.minimum(reached_B1, k_B1)
        last_B1 = sorted_BV.gather(1, count_B1 - 1)
        keep_BV = w_BV >= last_B1
        if bool((keep_BV.sum(-1, keepdim=True) > count_B1).any()):
            above_BV = w_BV > last_B1
            equal_BV = w_BV == last_B1
            ties_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
            keep_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1) <= ties_B1))
        return keep_BV

    def _logprobs(
        self, logits_BV: Tensor, ids_B: Tensor, items: Sequence[Scheduled], reported: list[int]
    ) -> list[Sampled]:
        """Log-softmax of the raw logits: what the model said, before any parameter."""
        if not reported:
            return []
        rows = self._tensor(reported, torch.int64)
        raw_BV = logits_BV[rows].log_softmax(-1)
        ids_B1 = ids_B[rows][:, None]
        chosen_B1 = raw_BV.gather(1, ids_B1)
        ranks = ((raw_BV > chosen_B1).sum(-1) + 1).tolist()
        chosen = _finite(chosen_B1)[:, 0].tolist()
        tokens = ids_B1[:, 0].tolist()
        wanted = [min(items[row].request.params.logprobs or 0, self.vocab_size) for row in reported]
        tops: list[tuple[TokenLogprob, ...]] = [()] * len(reported)
        for count in set(wanted) - {0}:  # per count, since ties at the end depend on it
            at = [n for n, want in enumerate(wanted) if want == count]
            values, ids = raw_BV[self._tensor(at, torch.int64)].topk(count)
            for n, row_values, row_ids in zip(
                at, _finite(values).tolist(), ids.tolist(), strict=True
            ):
                pairs = sorted(zip(row_values, row_ids, strict=True), key=lambda p: (-p[0], p[1]))
                tops[n] = tuple(TokenLogprob(t, v, r) for r, (v, t) in enumerate(pairs, 1))
        return [
            Sampled(token, TokenLogprob(token, value, rank), top)
            for token, value, rank, top in zip(tokens, chosen, ranks, tops, strict=True)
        ]

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _descending(x_BV: Tensor) -> Tensor:
    if x_BV.device.type != "cpu":
        return x_BV.sort(-1, descending=True).values
    # 30 times as fast as torch's here: numpy sorts plain values with vector instructions.
    return torch.from_numpy(np.sort(x_BV.numpy(), axis=-1)).flip(-1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)


_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """In (0, 1): a function of its arguments alone (splitmix64, Steele et al. 2014, twice)."""
    x = _mix((seed + _STEP) & _MASK)
    return ((_mix((x + (index + 1) * _STEP) & _MASK) >> 12) + 0.5) * 2.0**-52


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
