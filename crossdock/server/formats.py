"""The two shapes an answer has on the wire: completions and chat completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from crossdock.server.border import TokenText, Update

_LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


@dataclass(eq=False)
class Choice:
    """One sequence as the client sees it grow. `offset`: characters of its tokens so far."""

    index: int
    prompt: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    offset: int = 0
    last_at: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Format(Protocol):
    kind: str
    chunk_kind: str
    id_prefix: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """A chunk's choice before the first token, if the format has one."""
        ...

    def delta(self, choice: Choice, update: Update, logprobs: bool) -> dict[str, Any]: ...
    def whole(self, choice: Choice, logprobs: bool) -> dict[str, Any]: ...


class CompletionFormat:
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def opening(self, choice: Choice) -> None:
        return None

    def delta(self, choice: Choice, update: Update, logprobs: bool) -> dict[str, Any]:
        return _ended(
            choice,
            {
                "index": choice.index,
                "text": update.text,
                "logprobs": self._logprobs(choice, update.logprobs) if logprobs else None,
                "finish_reason": choice.finish_reason,
            },
        )

    def whole(self, choice: Choice, logprobs: bool) -> dict[str, Any]:
        return _ended(
            choice,
            {
                "index": choice.index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice, choice.logprobs) if logprobs else None,
                "finish_reason": choice.finish_reason,
            },
        )

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token.token)
        return {
            "tokens": [t.token for t in tokens],
            "token_logprobs": [_finite(t.logprob) for t in tokens],
            "top_logprobs": [{a.token: _finite(a.logprob) for a in (t, *t.top)} for t in tokens],
            "text_offset": offsets,
        }


class ChatFormat:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def delta(self, choice: Choice, update: Update, logprobs: bool) -> dict[str, Any]:
        return _ended(
            choice,
            {
                "index": choice.index,
                "delta": {"content": update.text} if update.text else {},
                "logprobs": self._logprobs(update.logprobs) if logprobs else None,
                "finish_reason": choice.finish_reason,
            },
        )

    def whole(self, choice: Choice, logprobs: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return _ended(
            choice,
            {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(choice.logprobs) if logprobs else None,
                "finish_reason": choice.finish_reason,
            },
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "content": [
                {**_entry(token), "top_logprobs": [_entry(t) for t in token.top]}
                for token in tokens
            ],
            "refusal": None,
        }


def _ended(choice: Choice, values: dict[str, Any]) -> dict[str, Any]:
    if choice.finish_reason is not None:
        values["stop_reason"] = choice.stop_reason
    return values


def _entry(token: TokenText) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
