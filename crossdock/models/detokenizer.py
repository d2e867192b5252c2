"""From token ids to text as it streams: whole characters only, and stop strings.

Both classes hold one sequence's state; nothing here knows where the tokens come from.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that text is made from."""

    special_ids: frozenset[int]
    leading_space: bool
    """Whether decoding drops one space at the very start (SentencePiece's way)."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Text of a growing sequence; every delta ends at the end of a character.

    The deltas with `flush` concatenate to the decoding of the whole sequence. Invalid UTF-8 becomes
    U+FFFD as soon as it is known to be invalid. A token costs the same wherever it stands.

    Args:
        continues: whether the text follows a prompt, so that a space at its start is kept.
    """

    def __init__(
        self, tokenizer: TokenBytes, skip_special_tokens: bool = True, continues: bool = True
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.leading_space and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        skip, token_bytes = self._skip, self._token_bytes
        data = b"".join([token_bytes(t) for t in token_ids if t not in skip])
        return self._stripped(self._utf8.decode(data)) if data else ""

    def flush(self) -> str:
        """At the end of the sequence: U+FFFD if it stopped within a character."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopChecker:
    """Cuts a stream of text at the first stop string.

    The first one is the one that is complete first, whatever the deltas. Text that may be the
    beginning of a stop string is held back.

    Args:
        include: whether the stop string stays in the text.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False):
        self._stop, self._include = stop, include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """`(text that may be shown, the stop string found)`; nothing may follow a found one."""
        if not self._stop or not text:
            return text, None
        text = self._held + text
        found = [(i + len(s), i, s) for s in self._stop if (i := text.find(s)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = min(_beginning(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """At the end of the sequence: what was held back."""
        text, self._held = self._held, ""
        return text


def _beginning(text: str, stop: str) -> int:
    """Where the longest end of `text` that begins `stop` starts; len(text) if there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
