"""A tokenizer for models that have none: token i < 256 is byte i, all others show as one character,
so that a stream of tokens is one of text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossdock.models.tokenizer_files import check_text, no_chat_template

_OTHER = "\N{WHITE SQUARE}".encode()


class ByteTokenizer:
    vocab_size = 256
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    leading_space = False
    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        raise no_chat_template(Path("a model without a tokenizer"))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else _OTHER

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        data = token.encode()
        return data[0] if len(data) == 1 else None
