"""What a load generator must know of the server it drives, asked over HTTP."""

from dataclasses import dataclass, field
from typing import Any

from crossdock.bench.sse_client import Client, HTTPFailure
from crossdock.core import ConfigError

SAMPLE = (
    "Pack my box with five dozen liquor jugs! How vexingly quick daft zebras jump, said she; the "
    "quick brown fox jumps over a lazy dog and runs away from its master through the long night. "
    "0123456789 - A BCD EFG HIJ KLM NOP QRS TUV WXYZ, so what? (yes) [no] {maybe} #1 $2 50% & all."
)


@dataclass(frozen=True)
class Target:
    """`vocabulary`: token ids that prompts may be drawn from. `devices`: None if nobody said.

    `stream_options`: those the server takes; with "continuous_usage_stats" every chunk tells how
    many tokens there are so far.
    """

    model: str
    vocabulary: tuple[int, ...] | range
    max_model_len: int | None
    devices: int | None
    stream_options: dict[str, bool]
    facts: dict[str, Any] = field(default_factory=dict)


async def discover(client: Client, model: str | None) -> Target:
    """Asks /v1/models and /version, another engine's /tokenize, and tries one token.

    Raises:
        ConfigError: the server does not serve `model`.
        HTTPFailure: the server does not answer, or refuses the trial request.
    """
    cards = (await client.json("GET", "/v1/models"))["data"]
    names = [card["id"] for card in cards]
    if model is not None and model not in names:
        raise ConfigError(f"--model {model!r}: the server has {', '.join(names)}")
    card = cards[names.index(model) if model else 0]
    facts = await _optional_json(client, "/version")
    vocab_size = card.get("vocab_size")
    vocabulary = range(vocab_size) if vocab_size else await _sample_ids(client, card["id"])
    return Target(
        model=card["id"],
        vocabulary=vocabulary,
        max_model_len=card.get("max_model_len"),
        devices=facts.get("ranks"),
        stream_options=await _stream_options(client, card["id"], vocabulary[0]),
        facts=facts,
    )


async def _optional_json(client: Client, path: str) -> dict[str, Any]:
    try:
        answer = await client.json("GET", path)
    except HTTPFailure:
        return {}
    return answer if isinstance(answer, dict) else {}


async def _sample_ids(client: Client, model: str) -> tuple[int, ...]:
    """For a server that does not tell the size of its vocabulary: the ids of some English text."""
    answer = await client.json("POST", "/tokenize", {"model": model, "prompt": SAMPLE})
    return tuple(sorted(set(answer["tokens"])))


async def _stream_options(client: Client, model: str, token: int) -> dict[str, bool]:
    """Servers refuse options that they do not know, so one token is asked for with each set."""
    plain = {"include_usage": True}
    body = {"model": model, "prompt": [token], "max_tokens": 1, "stream": True}
    for options in ({**plain, "continuous_usage_stats": True}, plain):
        try:
            async for _ in client.events("/v1/completions", {**body, "stream_options": options}):
                pass
            return options
        except HTTPFailure as error:
            if options is plain or error.status not in (400, 422):
                raise
    raise AssertionError("one of the two returned or raised")
