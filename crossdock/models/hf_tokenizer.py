"""Tokenizers that transformers reads without running code: tokenizer.json or what becomes one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crossdock.core import CheckpointError, RequestError
from crossdock.models.tokenizer_files import check_text, eos_token_ids, no_chat_template, read_json

_SPACE = "\u2581"  # SentencePiece's mark for a space


class HFTokenizer:
    """transformers for loading and chat templates; its Rust backend for the rest.

    The backend is asked directly because the wrapper around it costs several times as much a call,
    and so that decoding never "cleans up" spaces, which a stream could not.
    """

    def __init__(self, model_dir: Path):
        self._dir = model_dir
        self._hf = _load(model_dir)
        self._rust = self._hf.backend_tokenizer
        # A tokenizer.json may carry the truncation it was trained with.
        self._rust.no_truncation()
        self._rust.no_padding()
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = self._hf.bos_token_id
        self.eos_token_ids = eos_token_ids(model_dir, self._hf.eos_token_id)
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.has_chat_template = self._hf.chat_template is not None
        self._prefix = self._bos_to_add()
        self._to_bytes, self.leading_space = _byte_rule(self._rust.decoder, model_dir)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        ids = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return self._prefix + ids if add_special_tokens else ids

    def _bos_to_add(self) -> list[int]:
        """DeepSeek's tokenizer.json does not add the BOS that its tokenizer_config.json asks for;
        transformers 4 then added it, transformers 5 does not."""
        wanted = read_json(self._dir / "tokenizer_config.json").get("add_bos_token") is True
        if not wanted or self.bos_token_id is None:
            return []
        return [] if self.bos_token_id in self._rust.encode("").ids else [self.bos_token_id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        if not self.has_chat_template:
            raise no_chat_template(self._dir)
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except Exception as error:  # whatever the template's own code meets in these messages
            raise RequestError(f"the chat template refuses them: {error}", "messages") from None
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            token = self._rust.id_to_token(token_id)
            data = b"" if token is None else self._to_bytes(token)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)


def _load(model_dir: Path) -> Any:
    # Importing it costs 1.5 s and brings torch: only the process that tokenizes pays for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer goes by tokenizer_class, for which some releases of transformers 5 override what
    # the tokenizer.json says: DeepSeek's, declared as Llama's, then loses its spaces.
    has_json = (model_dir / "tokenizer.json").exists()
    loader = PreTrainedTokenizerFast if has_json else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(
            str(model_dir), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{model_dir}: its tokenizer cannot be loaded: {first}; expected a tokenizer.json"
        ) from None
    if not tokenizer.is_fast:
        raise CheckpointError(f"{model_dir}: its tokenizer has no fast form; add a tokenizer.json")
    return tokenizer


def _byte_rule(decoder: Any, model_dir: Path) -> tuple[Callable[[str], bytes], bool]:
    """`(vocabulary entry -> its bytes, whether a text's first space is dropped)`."""
    spec = json.loads(decoder.__getstate__()) if decoder is not None else None
    if spec is None:  # words, joined with spaces
        return lambda token: b" " + token.encode(), True
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level, False
    sentencepiece = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if kinds & {"Replace", "Metaspace"} and kinds <= sentencepiece:
        drops = any(
            part.get("start", 0) > 0
            or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in parts
        )
        return _sentencepiece, drops
    raise CheckpointError(
        f"{model_dir}/tokenizer.json: decoder {' + '.join(sorted(kinds))} is not supported; "
        "supported: ByteLevel, and SentencePiece's (Metaspace, or Replace with ByteFallback)"
    )


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:  # an added token, which is spelled as it reads
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are themselves, the other bytes 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
