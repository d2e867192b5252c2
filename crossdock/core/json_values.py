"""Values of a parsed JSON object, refused unless they are of the kind their key asks for.

All raise KeyError where a key is missing that has no default, and ValueError, which says what was
given and what is expected.
"""

import math
from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
_MOST = 2**24
"""More than any model has of anything: a billion layers take all memory to be listed."""


def is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(values: Values, key: str, default: int | None = None, least: int = 1) -> int:
    value = values[key] if default is None else values.get(key, default)
    if not is_whole(value, least) or value > _MOST:
        raise ValueError(f"{key} {value!r}; expected a whole number from {least} to {_MOST}")
    return value


def whole_or_null(
    values: Values, key: str, default: int | None = None, least: int = 1
) -> int | None:
    if values.get(key, default) is None:
        return None
    return whole(values, key, default, least)


def number(values: Values, key: str, default: float | None = None, zero: bool = False) -> float:
    """Finite and above 0, or with `zero` from 0."""
    value = values[key] if default is None else values.get(key, default)
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not real or value < 0 or (value == 0 and not zero):
        raise ValueError(
            f"{key} {value!r}; expected a finite number {'from' if zero else 'above'} 0"
        )
    return float(value)


def number_or_null(values: Values, key: str) -> float | None:
    return None if values.get(key) is None else number(values, key)


def flag(values: Values, key: str, default: bool = False) -> bool:
    """null is false, as in Python."""
    value = values.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} {value!r}; expected true or false")
    return bool(value)


def table(values: Values, key: str) -> dict[str, Any]:
    """Without its keys that are null; empty where it is missing or null itself."""
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} {value!r}; expected an object")
    return {k: v for k, v in (value or {}).items() if v is not None}


def token_ids(values: Values, key: str) -> tuple[int, ...]:
    """One, a list of them or null, as tokens that end a text are given."""
    given = values.get(key)
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(is_whole(i, 0) for i in ids):
        raise ValueError(f"{key} {given!r}; expected a token id, a list of them or null")
    return tuple(ids)


def weight_block(block: Any) -> tuple[int, int]:
    """Of weights quantised in blocks: rows, columns."""
    if not isinstance(block, list) or len(block) != 2 or not all(map(is_whole, block)):
        raise ValueError(
            f"weight_block_size {block!r}; expected two whole numbers from 1, such as [128, 128]"
        )
    return block[0], block[1]
