"""From logits to tokens, on the device. Knows nothing of the model; keeps nothing between steps.

A row's result depends on its own logits, parameters, tokens so far and (seed, output index) alone:
not on the other rows, so a batch may be cut in any way, and not on where the earlier tokens were
sampled, so a request can be resumed anywhere.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from crossdock.core import BROKEN, Sampled, Scheduled, TokenLogprob
from crossdock.engine.row_ops import row_ops

GREEDY_BELOW = 1e-5
"""Temperatures under this mean argmax; dividing by them would overflow."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity and NaN, which JSON lacks."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Tokens that are being drawn, int64 on the device: told_B as the host is told them, BROKEN
    where logits are; ids_B what the next step takes. `read`: waits for them."""

    told_B: Tensor
    ids_B: Tensor
    read: Callable[[], list[Sampled]]


def told(told_B: Tensor) -> Draw:
    """Tokens without their probabilities, on their way to the host."""
    tokens_B, wait = _to_host(told_B), launched_until_now(told_B.device)

    def read() -> list[Sampled]:
        wait()
        return [Sampled(token) for token in tokens_B.tolist()]

    return Draw(told_B, told_B.clamp(min=0), read)


def launched_until_now(device: torch.device) -> Callable[[], None]:
    """Waits until the device is past all that the current stream has been given."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()
    done.record()
    return done.synchronize


class Sampler:
    """Order of things, as in vLLM: mask, min_tokens, logit_bias, penalties, temperature, min-p,
    top-k, top-p, draw. Ties go to the lowest token id throughout."""

    def __init__(self, vocab_size: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows = row_ops(self.device)

    @torch.inference_mode()
    def sample(
        self, logits_BV: Tensor, items: Sequence[Scheduled], mask: Tensor | None = None
    ) -> list[Sampled]:
        """As `draw`, and waits."""
        return self.draw(logits_BV, items, mask).read()

    @torch.inference_mode()
    def draw(
        self, logits_BV: Tensor, items: Sequence[Scheduled], mask: Tensor | None = None
    ) -> Draw:
        """One token for each item, all of which sample. On a GPU the host waits for nothing.

        Args:
            logits_BV: float32, left as it is, and not needed when this returns.
            mask: bool [B, V], False where a token is not allowed. A row that allows nothing yields
                some token, never an error.
        """
        if not items:
            none = self._tensor([], torch.int64)
            return Draw(none, none, list)
        ids_B = self._choose(self._adjust(logits_BV, items, mask), items)
        rows = [r for r, item in enumerate(items) if item.request.params.logprobs is not None]
        finish = self._logprobs(logits_BV, ids_B, items, rows) if rows else None
        # A hidden state that is not finite makes all logits so: looking at one costs least.
        sound_B = logits_BV.gather(1, ids_B[:, None])[:, 0].abs() < torch.inf
        drawn = told(torch.where(sound_B, ids_B, BROKEN))

        def read() -> list[Sampled]:
            sampled = drawn.read()
            for row, result in zip(rows, finish() if finish else (), strict=True):
                if sampled[row].token_id != BROKEN:
                    sampled[row] = result
            return sampled

        return Draw(drawn.told_B, drawn.ids_B, read)

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
            # A scalar of the host would be copied over, and waited for.
            x_BV[rows, ids] = x_BV.new_full((), -math.inf)
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
        counts = [len(row) for row in ids]
        lengths = self._tensor(counts, torch.int64)
        return self._tensor(values, dtype).repeat_interleave(lengths, output_size=sum(counts))

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
        w_BV = self._rows.softmax(x_BV)
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
        cdf_BV = self._rows.cumsum(w_BV)
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
        sums_BV = self._rows.cumsum(sorted_BV * in_k_BV)
        # A token stays while those before it have not reached p of the whole.
        reached_B1 = (sums_BV < p_B1 * sums_BV[:, -1:]).sum(-1, keepdim=True) + 1
        count_B1 = torch.minimum(reached_B1, k_B1)
        last_B1 = sorted_BV.gather(1, count_B1 - 1)
        keep_BV = w_BV >= last_B1
        # Asking a GPU whether there are ties would wait for it.
        if w_BV.is_cuda or bool((keep_BV.sum(-1, keepdim=True) > count_B1).any()):
            above_BV = w_BV > last_B1
            equal_BV = w_BV == last_B1
            ties_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
            keep_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1) <= ties_B1))
        return keep_BV

    def _logprobs(
        self, logits_BV: Tensor, ids_B: Tensor, items: Sequence[Scheduled], reported: list[int]
    ) -> Callable[[], list[Sampled]]:
        """Log-softmax of the raw logits: what the model said, before any parameter. To be called
        once the device is past this."""
        rows = self._tensor(reported, torch.int64)
        raw_BV = self._rows.log_softmax(logits_BV[rows])
        ids_B1 = ids_B[rows][:, None]
        chosen_B1 = raw_BV.gather(1, ids_B1)
        ranks_B = _to_host((raw_BV > chosen_B1).sum(-1) + 1)
        chosen_B, tokens_B = _to_host(_finite(chosen_B1)[:, 0]), _to_host(ids_B1[:, 0])
        wanted = [min(items[row].request.params.logprobs or 0, self.vocab_size) for row in reported]
        likeliest: list[tuple[list[int], Tensor, Tensor]] = []
        for count in set(wanted) - {0}:  # per count, since ties at the end depend on it
            at = [n for n, want in enumerate(wanted) if want == count]
            values, ids = self._rows.topk(raw_BV[self._tensor(at, torch.int64)], count)
            likeliest.append((at, _to_host(_finite(values)), _to_host(ids)))

        def finish() -> list[Sampled]:
            tops: list[tuple[TokenLogprob, ...]] = [()] * len(reported)
            for at, values, ids in likeliest:
                for n, row_values, row_ids in zip(at, values.tolist(), ids.tolist(), strict=True):
                    pairs = zip(row_values, row_ids, strict=True)
                    order = sorted(pairs, key=lambda p: (-p[0], p[1]))
                    tops[n] = tuple(TokenLogprob(t, v, r) for r, (v, t) in enumerate(order, 1))
            chosen = zip(tokens_B.tolist(), chosen_B.tolist(), ranks_B.tolist(), tops, strict=True)
            return [Sampled(t, TokenLogprob(t, value, r), top) for t, value, r, top in chosen]

        return finish

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        if self.device.type != "cuda":
            return torch.tensor(values, dtype=dtype, device=self.device)
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)


def _descending(x_BV: Tensor) -> Tensor:
    if x_BV.device.type != "cpu":
        return x_BV.sort(-1, descending=True).values
    # 30 times as fast as torch's here: numpy sorts plain values with vector instructions.
    return torch.from_numpy(np.sort(x_BV.numpy(), axis=-1)).flip(-1)


def _to_host(x: Tensor) -> Tensor:
    """There once the device is past this."""
    return x.to("cpu", non_blocking=True)


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
