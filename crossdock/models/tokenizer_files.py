"""What every tokenizer needs: the small JSON files beside the weights, and checks of its input."""

import json
from pathlib import Path
from typing import Any

from crossdock.core import CheckpointError, RequestError
from crossdock.core.json_values import token_ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def eos_token_ids(model_dir: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a sequence: of generation_config.json, config.json and the tokenizer.

    They differ in real checkpoints: a chat model's end of turn may be in the first one alone.
    """
    ids: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        try:
            ids += token_ids(read_json(model_dir / name), "eos_token_id")
        except ValueError as error:
            raise CheckpointError(f"{model_dir / name}: {error}") from None
    return tuple(i for i in dict.fromkeys([*ids, tokenizer_eos]) if i is not None)


def check_text(text: str) -> None:
    """Raises RequestError for text that has no UTF-8 form (JSON can say "\\ud800")."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}; "
            "expected valid Unicode"
        ) from None


def no_chat_template(model_dir: Path) -> RequestError:
    return RequestError(
        f"{model_dir.name} has no chat template, so chat messages have no defined form; "
        "send a plain prompt to /v1/completions",
        "messages",
    )
