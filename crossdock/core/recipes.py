"""Where the shipped descriptions of models and hardware lie."""

import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, Literal

from crossdock.core.errors import ConfigError

Kind = Literal["models", "hardware"]
_SUFFIXES = {"models": (".json", ".toml"), "hardware": (".toml",)}


def recipes_dir() -> Path:
    """`recipes/` of the checkout, or where an installation puts it.

    Raises:
        ConfigError: neither is there.
    """
    beside = Path(__file__).resolve().parents[2] / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "crossdock" / "recipes"
    for path in (beside, installed):
        if (path / "hardware").is_dir():
            return path
    raise ConfigError(
        f"no shipped recipes: looked in {beside} and {installed}; give the path of a file instead"
    )


def recipe_names(kind: Kind) -> list[str]:
    folder = recipes_dir() / kind
    return sorted(path.stem for path in folder.iterdir() if path.suffix in _SUFFIXES[kind])


def find_recipe(kind: Kind, name: str) -> Path | None:
    """The file of the recipe called `name`, in whatever case."""
    for suffix in _SUFFIXES[kind]:
        path = recipes_dir() / kind / f"{name.lower()}{suffix}"
        if path.is_file():
            return path
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError, naming the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def positive(where: str, values: dict[str, Any], key: str) -> float:
    """Raises ConfigError unless `values[key]` is a finite number above 0."""
    value = values[key]
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (real and 0 < value <= sys.float_info.max):
        raise ConfigError(f"{where}: {key} = {value!r}; expected a finite number above 0")
    return float(value)


def share(where: str, values: dict[str, Any], key: str) -> float:
    """1 where the key is missing. Raises ConfigError unless it is above 0 and at most 1."""
    value = positive(where, {key: 1.0, **values}, key)
    if value > 1:
        raise ConfigError(f"{where}: {key} = {value}; expected a share of at most 1")
    return value


def check_keys(where: str, values: dict[str, Any], known: dict[str, Any], needed: set[str]) -> None:
    """That `values` has only keys of `known`, of the types it gives, and all that are `needed`.

    Raises:
        ConfigError: names the key, what was given and what is expected.
    """
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}; known keys: {', '.join(sorted(known))}")
        kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{where}: {key} = {value!r}; expected {names}")
        if isinstance(value, (int, float)) and not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"{where}: {key} = {value}; expected a finite number of at least 0")
    if missing := sorted(needed - values.keys()):
        raise ConfigError(f"{where}: missing: {', '.join(missing)}")
