"""A request in flight, and what ranks are told of it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from crossdock.core import Request, SamplingParams
from crossdock.launch.output import Choice, Update

OnUpdate = Callable[[Update], None]


class Submission(NamedTuple):
    """`params.n` continuations of `prompt_ids` are wanted."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    on_update: OnUpdate


@dataclass
class Opened:
    """Everything needed to run it again elsewhere. `serial` tells it from an earlier one of the
    same id, of which a rank may still be speaking."""

    id: str
    serial: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_update: OnUpdate
    choices: dict[int, Choice] = field(default_factory=dict)

    def name(self, index: int) -> str:
        """What the ranks call a choice; never used twice."""
        return f"{self.id}/{self.serial}/{index}"

    def params_of(self, index: int) -> SamplingParams:
        params = self.params
        if params.n > 1 and params.seed is not None:
            params = replace(params, seed=(params.seed + index) % 2**64)
        return params

    def request(self, index: int, eos_token_ids: tuple[int, ...], seed: int) -> Request:
        """Of a choice. `seed`: of the engine."""
        source = f"{seed}|{self.id}/{index}"
        digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
        return Request(
            self.name(index),
            self.prompt_ids,
            self.params_of(index),
            eos_token_ids=eos_token_ids,
            key=int.from_bytes(digest, "little"),
        )
