"""Kimi's tokenizer (Kimi-K2, Moonlight), read without running its tokenization_kimi.py."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crossdock.core import CheckpointError, RequestError
from crossdock.models.tokenizer_files import (
    check_text,
    eos_token_ids,
    no_chat_template,
    read_json,
)

VOCAB_FILE = "tiktoken.model"
_NUM_SPECIAL = 256
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# As tokenization_kimi.py splits text: runs of Han characters, words, up to three digits, the rest.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# tiktoken's regex engine overflows its stack on longer texts and runs; Kimi cuts there too.
_MAX_TEXT, _MAX_RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"\S{{{_MAX_RUN + 1},}}|\s{{{_MAX_RUN + 1},}}")


class KimiTokenizer:
    """Byte-level BPE; 256 special tokens follow the ranks, named by tokenizer_config.json."""

    leading_space = False

    def __init__(self, model_dir: Path):
        import tiktoken

        self._dir = model_dir
        config = read_json(model_dir / "tokenizer_config.json")
        ranks = _read_ranks(model_dir / VOCAB_FILE)
        added = _added_tokens(model_dir, config)
        end = max([len(ranks) + _NUM_SPECIAL, *(i + 1 for i in added)])
        names = {i: f"<|reserved_token_{i}|>" for i in range(len(ranks), end)}
        names |= {i: token["content"] for i, token in added.items() if i >= len(ranks)}
        self._special = {name: i for i, name in names.items()}
        try:
            self._bpe = tiktoken.Encoding(
                VOCAB_FILE, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._special
            )
        except Exception as error:
            raise CheckpointError(
                f"{model_dir / VOCAB_FILE}: not a usable vocabulary: {error}"
            ) from None
        self._special_bytes = {i: name.encode() for i, name in names.items()}
        self.special_ids = frozenset(
            i for i in names if i not in added or added[i].get("special", True)
        )
        self.vocab_size = end
        self.bos_token_id = self._special.get(_name(config.get("bos_token")))
        eos = self._special.get(_name(config.get("eos_token")))
        self.eos_token_ids = eos_token_ids(model_dir, eos)
        self._template = _chat_template(model_dir, config)
        self.has_chat_template = self._template is not None
        self._names = {f"{key}": _name(config[key]) for key in config if key.endswith("_token")}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Kimi adds no special tokens of its own, so `add_special_tokens` changes nothing."""
        check_text(text)
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._bpe.encode(piece, allowed_special="all")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        if self._template is None:
            raise no_chat_template(self._dir)
        # A template is a program; transformers runs it in its sandbox.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                **{**self._names, **kwargs},
            )
        except Exception as error:  # whatever the template's own code meets in these messages
            raise RequestError(f"the chat template refuses them: {error}", "messages") from None
        texts, _ = rendered
        return self.encode(texts[0])

    def token_bytes(self, token_id: int) -> bytes:
        special = self._special_bytes.get(token_id)
        if special is not None:
            return special
        try:
            return self._bpe.decode_single_token_bytes(token_id)
        except (KeyError, OverflowError):
            return b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        try:
            return self._bpe.encode_single_token(token)
        except KeyError:
            return None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of `base64(bytes) rank`. tiktoken's own reader wants a package and caches in /tmp."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(
            f"{path}:{len(ranks) + 1}: expected 'base64 rank', got {line[:60]!r}"
        ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise CheckpointError(
            f"{path}: truncated or corrupt: {len(ranks)} tokens whose ranks are not 0 to "
            f"{len(ranks) - 1}, or fewer than one per byte"
        )
    return ranks


def _added_tokens(model_dir: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    try:
        added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        if any(not isinstance(token["content"], str) for token in added.values()):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{model_dir / 'tokenizer_config.json'}: added_tokens_decoder: expected an object of "
            '{"id": {"content": "..."}}'
        ) from None
    return added


def _chat_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


def _name(token: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object with it as "content"."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), _MAX_TEXT):
        block, start = text[at : at + _MAX_TEXT], 0
        for run in _LONG_RUN.finditer(block):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield block[start:cut]
                start = cut
        yield block[start:]
