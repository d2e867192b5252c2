"""Prompts and arrival times for a load; seeded, so that two engines can be given the same."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossdock.core import ConfigError


@dataclass(frozen=True)
class Prompt:
    """What one request sends: token ids, and how many tokens it wants back."""

    token_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class Conversation:
    """The first two turns of a ShareGPT entry, still text."""

    prompt: str
    answer: str


def random_prompts(
    count: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocabulary: Sequence[int],
    seed: str,
) -> list[Prompt]:
    """Token ids drawn uniformly from `vocabulary`, lengths uniformly from the inclusive ranges."""
    rng = random.Random(seed)
    return [
        Prompt(tuple(rng.choices(vocabulary, k=rng.randint(*input_len))), rng.randint(*output_len))
        for _ in range(count)
    ]


def read_sharegpt(path: Path, seed: str) -> list[Conversation]:
    """Entries that begin with a human's turn and its answer, shuffled.

    Raises:
        ConfigError: no such file, no JSON list, or no usable entry in it.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--dataset: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset: {path}: not JSON: {error}") from None
    found = []
    for entry in entries if isinstance(entries, list) else ():
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        texts = [str(turn.get("value", "")) for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) == 2 and all(texts):
            found.append(Conversation(*texts))
    if not found:
        raise ConfigError(
            f"--dataset: {path}: no entry with two turns; expected a list of "
            '{"conversations": [{"from", "value"}, ...]}'
        )
    random.Random(seed).shuffle(found)
    return found


def arrival_times(count: int, rate: float, seed: str) -> Iterator[float]:
    """Seconds after the start, of a Poisson process of `rate` per second; inf: all at once."""
    rng = random.Random(seed)
    now = 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
