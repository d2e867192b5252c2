"""`recipes/anchors.toml`: loads that engines are compared by, and stored and asked figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from crossdock.core import ConfigError
from crossdock.core.recipes import read_toml, recipes_dir

CHANGED = ("layers", "quantize", "kv_cache_dtype", "dtype")
"""Settings with which a model is another one than the figures are of."""


@dataclass(frozen=True)
class Load:
    """What engines are given: all prompts at once. `name`: "" where there is but one."""

    name: str
    num_prompts: int
    input_len: tuple[int, int]
    output_len: int

    @property
    def counts_input(self) -> bool:
        """Whether tokens of prompts are what its rate counts."""
        return self.output_len == 1


@dataclass(frozen=True)
class Figures:
    """`stored`: by label, as a case's `against`. Rates are per GPU."""

    stored: dict[str, float]
    asked: float | None


class Anchors:
    """
    Raises:
        ConfigError: the file is not there.
    """

    def __init__(self) -> None:
        path = recipes_dir() / "anchors.toml"
        if not path.is_file():
            raise ConfigError(f"{path}: not there; it ships with crossdock")
        self._values = read_toml(path)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return dict(self._values["settings"])

    def loads(self, ranks: int, names: Sequence[str]) -> tuple[Load, ...]:
        """Those of `names`, or with "all" every one, in the order of the file.

        Raises:
            ConfigError: a name that none has.
        """
        known = self._values["load"]
        if unknown := [name for name in names if name not in (*known, "all")]:
            raise ConfigError(
                f"--anchors {unknown[0]!r}: expected all, or some of {', '.join(known)}"
            )
        return tuple(
            Load(
                name,
                of["prompts"] * ranks,
                (of["input_len"], of["input_len"]),
                of["output_len"],
            )
            for name, of in known.items()
            if "all" in names or name in names
        )

    def rates(
        self, model: str, device: str, ranks: int, settings: dict[str, Any], load: str
    ) -> Figures:
        """Of a load, where the figures are of this model, device and number of ranks; `settings`:
        those of the engine that was run."""
        stored = {
            _label(of): float(of["tokens_per_second"][load])
            for of in self._matching("stored", model, device, ranks, settings)
            if load in of["tokens_per_second"]
        }
        asked = [
            float(of["tokens_per_second"][load])
            for of in self._matching("asked", model, device, ranks, settings)
            if load in of["tokens_per_second"]
        ]
        return Figures(stored, asked[0] if asked else None)

    def start(self, model: str, device: str, ranks: int, settings: dict[str, Any]) -> Figures:
        """Seconds to the first token; stored: to readiness, the shortest of several starts."""
        where = model, device, ranks, settings
        stored = {
            f"{_label(of)}, to readiness": float(min(of["seconds_to_ready"]))
            for of in self._matching("stored", *where)
        }
        asked = [
            float(of["seconds_to_first_token"])
            for of in self._matching("asked", *where)
            if "seconds_to_first_token" in of
        ]
        return Figures(stored, asked[0] if asked else None)

    def judges_start(self, model: str, ranks: int, settings: dict[str, Any]) -> bool:
        """Whether there are figures of `start`, on any device."""
        where = model, None, ranks, settings
        asked = self._matching("asked", *where)
        stored = self._matching("stored", *where)
        return bool(stored) or any("seconds_to_first_token" in of for of in asked)

    def _matching(
        self, kind: str, model: str, device: str | None, ranks: int, settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """`device`: None for any."""
        asis = all(settings.get(name) in (None, "auto", "none") for name in CHANGED)
        alike = all(
            settings.get(name) == self._values["settings"][name]
            for name in ("routing", "max_num_batched_tokens")
        )
        if not (asis and alike):
            return []
        name = PurePath(model).stem.lower()
        return [
            of
            for of in self._values[kind]
            if of["model"] == name
            and (device is None or of["gpu"] in device.split())
            and of["ranks"] == ranks
        ]


def _label(of: dict[str, Any]) -> str:
    return f"{of['engine']}, stored anchor, not run here"
