"""The proof that moving experts changes no answer: the same requests with placements drawn at
random one after another, as fast as they can be moved to, and with none."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossdock.core import (
    CrossdockError,
    ModelSpec,
    Placement,
    SamplingParams,
    load_spec,
)
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.launch.llm import LLM
from crossdock.models.hub import resolve_model

RANKS = (1, 2, 4)
SEED = 33
PROMPTS = (40, 1, 23, 9, 31, 16)
"""Tokens of each, drawn at random: the proof needs no tokenizer."""
OUTPUT_LEN = 32
TOP_LOGPROBS = 20
TEXTS = (24, 32, 17)
"""Tokens of each text whose log-likelihood is compared."""
SURELY = 100.0
"""Added to a logit, so that its token is chosen; what is reported is from before."""
ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""How far the mean log-likelihood of a text's tokens may differ, by the dtype of activations."""

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """One comparison with an engine of one rank that moves nothing.

    compared: values looked at. differ: of them, not equal in invariant mode, else off by more than
    rounding. worst: the largest difference. moves, layers: placements moved to meanwhile, and
    layers switched; steps: of the ranks.
    """

    mode: str
    ranks: int
    slots: int
    moves: int
    layers: int
    steps: int
    compared: int
    differ: int
    worst: float

    @property
    def holds(self) -> bool:
        return self.differ == 0 and self.layers > 0 and self.compared > 0


def prove(
    model: str, on_stage: OnStage, ranks: Sequence[int] = RANKS, **settings: Any
) -> Iterator[Proof]:
    """In invariant mode (CPU ranks) tokens and log-probabilities are equal, bit by bit; in ordinary
    mode the log-likelihoods of texts to rounding. `settings`: of the ordinary engines.

    Raises:
        UserError: the model, or a number of ranks that it cannot have.
        CrossdockError: an engine failed, or a placement could not be moved to.
    """
    spec = load_spec(resolve_model(model, None))
    invariant = {"device": "cpu", "invariant": True}
    ordinary = {"device": "auto", "prefix_caching": False, **settings}
    for mode, fixed, ask in (
        ("invariant", invariant, _answers),
        ("ordinary", ordinary, _likelihoods),
    ):
        shared = {"max_model_len": min(spec.max_position, 128), **fixed}
        on_stage(f"{mode}: 1 rank, nothing moves")
        with LLM(model, 1, **shared) as llm:
            want, dtype = ask(llm), str(llm.client.info[0]["dtype"])
        rounding = 0.0 if mode == "invariant" else ROUNDING[dtype]
        for count in ranks:
            on_stage(f"{mode}: {count} rank{'s' * (count > 1)}, experts on the move")
            with LLM(model, count, **shared, **_movable(spec, count)) as llm:
                with _moving(llm) as moved:
                    got = ask(llm)
                steps = llm.client.reading().steps
                slots = llm.client.placement.slots_per_rank * count
            worst, differ = compare(want, got, rounding)
            layers = sum(moved)
            yield Proof(mode, count, slots, len(moved), layers, steps, len(want), differ, worst)


def compare(want: Sequence[float], got: Sequence[float], rounding: float) -> tuple[float, int]:
    """The largest difference and how many are over `rounding`; NaN differs from everything."""
    if len(want) != len(got):
        return float("inf"), max(len(want), len(got))
    off = np.abs(np.subtract(want, got, dtype=np.float64))
    wrong = ~(off <= rounding)
    return float(np.nanmax(off, initial=0.0)), int(wrong.sum())


def _movable(spec: ModelSpec, ranks: int) -> dict[str, Any]:
    """Slots for replicas, an eighth of the experts or one a rank; and no layer moved in one step,
    nor in many."""
    experts = spec.moe.num_experts
    redundant = -experts % ranks + ranks * max(1, experts // (8 * ranks))
    layer_bytes = (experts + redundant) // ranks * spec.expert_params * DTYPE_BYTES["float32"]
    return {
        "redundant_experts": redundant,
        "rebalance": "manual",
        "rebalance_step_mib": layer_bytes / 2 / (1 << 20),
    }


def _answers(llm: LLM) -> list[float]:
    """Tokens and log-probabilities of greedy continuations, one after the other."""
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=TOP_LOGPROBS
    )
    values: list[float] = []
    for output in llm.generate(_draw(llm, PROMPTS), params):
        for token in output.outputs[0].logprobs or ():
            for entry in (token, *token.top):
                values += (entry.token_id, entry.logprob)
    return values


def _likelihoods(llm: LLM) -> list[float]:
    """The mean log-likelihood per token of each text: every token is forced after those before."""
    texts = _draw(llm, TEXTS)
    prefixes, params = [], []
    for text in texts:
        for length in range(1, len(text)):
            prefixes.append(text[:length])
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=1,
                    ignore_eos=True,
                    logprobs=0,
                    logit_bias=((text[length], SURELY),),
                )
            )
    said = []
    for output, sure in zip(llm.generate(prefixes, params), params, strict=True):
        (token,) = output.outputs[0].logprobs or ()
        if token.token_id != sure.logit_bias[0][0]:
            raise CrossdockError(f"token {sure.logit_bias[0][0]} could not be forced")
        said.append(token.logprob)
    ends = np.cumsum([len(text) - 1 for text in texts])
    return [float(np.mean(part)) for part in np.split(said, ends[:-1])]


def _draw(llm: LLM, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(SEED)
    vocab = llm.client.spec.vocab_size
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


@contextmanager
def _moving(llm: LLM) -> Iterator[list[int]]:
    """Moves experts about until the end of the block. Yields the layers switched by each move."""
    rng = np.random.default_rng(SEED)
    stop, moved, errors = threading.Event(), list[int](), list[str]()

    def move() -> None:
        try:
            while not moved or not stop.is_set():  # once however late this thread begins
                ended = llm.client.rebalance(shuffled(rng, llm.client.placement))
                if ended.error is not None:
                    raise CrossdockError(ended.error)
                moved.append(ended.layers)
        except CrossdockError as error:
            errors.append(str(error))

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    try:
        yield moved
    finally:
        stop.set()
        thread.join()
    if errors:
        raise CrossdockError(f"experts could not be moved: {errors[0]}")


def shuffled(rng: np.random.Generator, placement: Placement) -> np.ndarray:
    """Every expert somewhere, and in the slots that are left any expert or none."""
    experts, slots = placement.num_experts, placement.slot_expert_LP.shape[1]
    rows = [
        rng.permutation(
            np.concatenate([np.arange(experts), rng.integers(-1, experts, slots - experts)])
        )
        for _ in placement.slot_expert_LP
    ]
    return np.array(rows)
