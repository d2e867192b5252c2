"""Recorded expert loads: our JSON document, SGLang's `logical_count` and vLLM's `load_history`.

    {"windows": [{"steps": 100, "tokens": [[...], ...]}, ...],
     "placement": [[...], ...], "expert_bytes": 1769472}

`tokens`: layers x logical experts, what was routed to each in the window's steps, all ranks
together, without idle and padding rows. `placement` (layers x slots, -1 empty) and `expert_bytes`
(of one expert in one layer) may be missing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossdock.balance.check import check_loads, check_placement
from crossdock.core import ConfigError

KNOWN = "windows (ours), logical_count (SGLang) or load_history (vLLM)"


@dataclass(frozen=True, eq=False)
class Loads:
    """`load_WLE`: tokens by window, MoE layer and logical expert. `steps_W`: of each window.
    `placement_LP`, `expert_bytes`: None where the document does not say."""

    load_WLE: np.ndarray
    steps_W: np.ndarray
    placement_LP: np.ndarray | None = None
    expert_bytes: int | None = None

    def total_LE(self) -> np.ndarray:
        return self.load_WLE.sum(axis=0)

    def document(self) -> dict[str, Any]:
        """What `parse_loads` reads."""
        document: dict[str, Any] = {
            "windows": [
                {"steps": int(steps), "tokens": tokens_LE.tolist()}
                for steps, tokens_LE in zip(self.steps_W, self.load_WLE, strict=True)
            ]
        }
        if self.placement_LP is not None:
            document["placement"] = self.placement_LP.tolist()
        if self.expert_bytes is not None:
            document["expert_bytes"] = self.expert_bytes
        return document


def read_loads(path: Path) -> Loads:
    """
    Raises:
        ConfigError: names the file and what is wrong with it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    return parse_loads(document, str(path))


def parse_loads(document: Any, name: str) -> Loads:
    """A document of any of the three kinds; arrays may stand for lists.

    Raises:
        ConfigError: begins with `name`; says which entry is wrong.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{name}: expected an object with {KNOWN}")
    if "windows" in document:
        return _ours(document, name)
    if "logical_count" in document:
        load_WLE = _numbers(document["logical_count"], f"{name}: logical_count")
        if load_WLE.ndim == 2:  # one dump, steps summed up
            load_WLE = load_WLE[None]
    elif "load_history" in document:
        history = _entries(document, "load_history", name)
        load_WLE = _stack(history, "logical_expert_load", f"{name}: load_history")
    else:
        keys = ", ".join(sorted(map(str, document))[:8]) or "nothing"
        raise ConfigError(f"{name}: expected {KNOWN}, got an object with {keys}")
    check_loads(load_WLE, f"{name}: loads", "[windows, layers, experts]", 3)
    return Loads(load_WLE, np.ones(len(load_WLE), dtype=np.int64))


def _ours(document: Mapping[str, Any], name: str) -> Loads:
    windows = _entries(document, "windows", name)
    load_WLE = _stack(windows, "tokens", f"{name}: windows")
    check_loads(load_WLE, f"{name}: windows", "[windows, layers, experts]", 3)
    steps = [window.get("steps", 1) for window in windows]
    for index, value in enumerate(steps):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: windows[{index}].steps: expected from 1, got {value!r}")
    expert_bytes = document.get("expert_bytes")
    if expert_bytes is not None and (not isinstance(expert_bytes, int) or expert_bytes < 1):
        raise ConfigError(f"{name}: expert_bytes: expected from 1, got {expert_bytes!r}")
    placement_LP = None
    if document.get("placement") is not None:
        placement_LP = _numbers(document["placement"], f"{name}: placement")
        if placement_LP.ndim != 2 or placement_LP.dtype.kind != "i":
            raise ConfigError(f"{name}: placement: expected whole numbers, layers x slots")
        _, num_layers, num_experts = load_WLE.shape
        try:
            check_placement(placement_LP, num_layers, num_experts, placement_LP.shape[1])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return Loads(load_WLE, np.array(steps), placement_LP, expert_bytes)


def _entries(document: Mapping[str, Any], key: str, name: str) -> Sequence[Mapping[str, Any]]:
    entries = document[key]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{name}: {key}: expected a list with at least one window")
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{name}: {key}[{index}]: expected an object, got {entry!r:.40}")
    return entries


def _stack(entries: Sequence[Mapping[str, Any]], key: str, name: str) -> np.ndarray:
    rows = []
    for index, entry in enumerate(entries):
        if key not in entry:
            raise ConfigError(f"{name}[{index}]: has no {key}")
        rows.append(_numbers(entry[key], f"{name}[{index}].{key}"))
        if rows[-1].ndim != 2 or rows[-1].shape != rows[0].shape:
            raise ConfigError(
                f"{name}[{index}].{key}: expected layers x experts, alike in all windows: got "
                f"{rows[-1].shape}, the first has {rows[0].shape}"
            )
    return np.stack(rows)


def _numbers(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        raise ConfigError(f"{name}: rows differ in length") from None
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{name}: expected numbers, got values of type {array.dtype}")
    return array if array.dtype.kind == "f" else array.astype(np.int64)
