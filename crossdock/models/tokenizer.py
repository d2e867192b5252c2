"""The tokenizer of a checkpoint, whatever its files. Runs no code of the checkpoint's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from crossdock.core import CheckpointError
from crossdock.models.hf_tokenizer import HFTokenizer
from crossdock.models.kimi_tokenizer import VOCAB_FILE, KimiTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", VOCAB_FILE)


class Tokenizer(Protocol):
    vocab_size: int
    """Tokens that have a text; a model's own vocabulary may be padded beyond."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    leading_space: bool
    """Whether decoding drops one space at the very start (SentencePiece's way)."""
    has_chat_template: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Names of special tokens in `text` become those tokens. RequestError: invalid Unicode."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """`kwargs` go to the template. RequestError: there is none, or it refuses the messages."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, which may be part of a character; empty if unknown."""
        ...

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a special token by its name, or of a vocabulary entry as spelled there."""
        ...


def holds_tokenizer(model_dir: Path) -> bool:
    return any((model_dir / name).exists() for name in _FILES)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises CheckpointError: no tokenizer files, or none that can be read without running code."""
    model_dir = Path(model_dir)
    if not holds_tokenizer(model_dir):
        raise CheckpointError(
            f"{model_dir}: holds no tokenizer; expected one of {', '.join(_FILES)}"
        )
    if (model_dir / VOCAB_FILE).exists() and not (model_dir / "tokenizer.json").exists():
        return KimiTokenizer(model_dir)
    return HFTokenizer(model_dir)
