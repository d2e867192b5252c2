"""What gateway and ranks say to each other, as JSON: nothing is ever unpickled.

A dataclass travels as an object with its class under "$"; arrays come back as tuples. What there is
one of for every token has a shorter form: token ids, and the outputs of a step.
"""

import json
from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass, fields
from typing import Any

from crossdock.core.config import EngineConfig
from crossdock.core.errors import CrossdockError
from crossdock.core.request import Request, Sampled, SamplingParams, TokenLogprob, TokenOutput


@dataclass(frozen=True)
class Start:
    """First message to a rank. `fds`: names and numbers of inherited descriptors."""

    rank: int
    config: EngineConfig
    fds: dict[str, int]
    rendezvous: str


@dataclass(frozen=True)
class Progress:
    """While loading: a stage and how much of it is done."""

    rank: int
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """A rank can serve. `info`: device, bytes of weights and KV, tokens the KV holds, seconds."""

    rank: int
    info: dict[str, Any]


@dataclass(frozen=True)
class Add:
    """A rank that sleeps goes on sleeping: so that many requests are there when it begins."""

    request: Request


@dataclass(frozen=True)
class Wake:
    """`wave` counts the gateway's calls to work; a rank may only sleep when all saw the same."""

    wave: int


@dataclass(frozen=True)
class Rebalance:
    """Move to another placement; all ranks hear of it, and of a wave, so that none sleeps."""

    epoch: int
    slot_expert_LP: tuple[tuple[int, ...], ...]
    wave: int


@dataclass(frozen=True)
class Rebalanced:
    """How it ended on a rank: layers that have the new placement, and why not all of them."""

    rank: int
    epoch: int
    layers: int
    moved_bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Report:
    """Ask a rank for its metrics now. `number`: counts up."""

    number: int


@dataclass(frozen=True)
class Trace:
    """Record the next `steps` steps that run; none: give up the trace `id`, which is above 0."""

    id: int
    steps: int


@dataclass(frozen=True)
class Traced:
    """What a rank recorded. intervals: (step, part, start, end), in ns of a clock that the ranks
    share. steps: (step, tokens of this rank, decodes among them, operations, bytes) that it needed,
    see `RankWork`."""

    rank: int
    id: int
    intervals: tuple[tuple[int, str, int, int], ...] = ()
    steps: tuple[tuple[int, int, int, int, int], ...] = ()


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Outputs:
    rank: int
    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True)
class Snapshot:
    """A rank's metrics, all totals since its start (gauges excepted); see metrics.Recorder.
    `number`: of the report asked for."""

    rank: int
    values: dict[str, Any]
    number: int = 0


@dataclass(frozen=True)
class Failure:
    """A rank cannot go on. `lost`: the rank that did not come, if another one is to blame."""

    rank: int
    message: str
    lost: int | None = None
    user_error: bool = False
    trace: str = ""


_CLASSES = {
    cls.__name__: cls
    for cls in (
        Start, Progress, Ready, Add, Wake, Rebalance, Rebalanced, Abort, Report, Trace, Traced,
        Stop, Outputs, Snapshot, Failure,
        EngineConfig, Request, SamplingParams, TokenLogprob,
    )
}  # fmt: skip


def encode(message: Any) -> bytes:
    return json.dumps(message, default=_to_dict, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    try:
        return json.loads(data, object_hook=_from_dict)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CrossdockError(f"a message on the rank channel is malformed: {error}") from None


_TOKEN_IDS = frozenset(("prompt_ids", "emitted"))
"""Of a `Request`: they travel as 32-bit integers in base64, in a third of the time, since a rank
reads them between two steps."""

# Field names and defaults; what equals its default does not travel, since tokens are many.
_FIELDS = {cls: tuple((f.name, f.default) for f in fields(cls)) for cls in _CLASSES.values()}


def _to_dict(value: Any) -> dict[str, Any]:
    known = _FIELDS.get(type(value))
    if known is None:
        raise TypeError(f"{type(value).__name__} does not travel between processes")
    message = {"$": type(value).__name__}
    for name, default in known:
        item = getattr(value, name)
        if item is not default:
            message[name] = item
    for name in _TOKEN_IDS.intersection(message) if isinstance(value, Request) else ():
        message[name] = b64encode(array("i", message[name]).tobytes()).decode()
    return message


def _from_dict(value: dict[str, Any]) -> Any:
    name = value.pop("$", None)
    if name == "Request":
        for field in _TOKEN_IDS.intersection(value):
            value[field] = tuple(array("i", b64decode(value[field])))
    if name == "Outputs":
        value["outputs"] = tuple([_output(*row) for row in value["outputs"]])
    value = {k: _tuples(v) for k, v in value.items()}
    return value if name is None else _CLASSES[name](**value)


def _output(request_id: str, tokens: list[Any], *rest: Any) -> TokenOutput:
    """Named tuples travel as arrays."""
    sampled = tuple([Sampled(token, logprob, tuple(top)) for token, logprob, top in tokens])
    return TokenOutput(request_id, sampled, *rest)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
