"""What a kind of GPU and its links can do: achievable rates, never datasheet ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossdock.core import ConfigError
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.core.recipes import (
    check_keys,
    find_recipe,
    positive,
    read_toml,
    recipe_names,
    recipes_dir,
    share,
)


@dataclass(frozen=True)
class Link:
    """One tier of the fabric as one GPU sees it, per direction."""

    name: str
    bytes_per_s: float
    latency_s: float
    """Of one message, from a kernel's store to the peer's sight of it."""
    nominal_bytes_per_s: float | None = None
    """Of the datasheet, for showing beside the achievable rate; None where it was measured."""
    all_to_all_s: tuple[tuple[int, float], ...] = ()
    """Measured: bytes that a rank sends, itself included, and seconds; empty where none was."""


@dataclass(frozen=True)
class Hardware:
    """`inner` joins the `domain_size` GPUs of a node (or NVLink domain), `outer` the domains."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    """Dense matrix products by dtype ("bfloat16", "float8_e4m3fn"), operations per second at a
    large shape; a dtype that the GPU cannot multiply natively is absent."""
    domain_size: int
    inner: Link
    outer: Link | None
    price_per_gpu_hour: float | None = None


_LINK: dict[str, Any] = {
    "name": str,
    "gbytes_per_s_per_direction": float,
    "achievable_share": float,
    "latency_us": float,
    "all_to_all_us": dict,
    "alone_gbytes_per_s_per_direction": list,
}
_HARDWARE: dict[str, Any] = {
    "memory_mib": float,
    "memory_gbytes_per_s": float,
    "memory_achievable_share": float,
    "domain_gpus": int,
    "inner": (str, dict),
    "outer": (str, dict),
    "usd_per_gpu_hour": float,
    "matmul_tflop_per_s": dict,
}
_OPTIONAL = {"outer", "memory_achievable_share", "usd_per_gpu_hour"}


def load_hardware(name_or_path: str | Path, fabric: str | None = None) -> Hardware:
    """A shipped kind by name (`h100`), or a TOML file in the same form, for instance one that
    `crossdock check --measure` wrote. `fabric`: a link of recipes/fabrics.toml to join the
    domains by, instead of the one the file names.

    Raises:
        ConfigError: no such name or file, or what is wrong in it.
    """
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        found = find_recipe("hardware", str(name_or_path))
        if found is None:
            raise ConfigError(
                f"no hardware {str(name_or_path)!r}: neither a file nor one of "
                f"{', '.join(recipe_names('hardware'))}"
            )
        path = found
    values = read_toml(path)
    hardware = parse_hardware(values, path.stem, str(path))
    if fabric is None:
        return hardware
    return replace(hardware, outer=_link("--fabric", "outer", fabric))


def parse_hardware(values: dict[str, Any], name: str, where: str) -> Hardware:
    """`where` names the source in errors. Raises ConfigError."""
    check_keys(where, values, _HARDWARE, _HARDWARE.keys() - _OPTIONAL)
    rates = values["matmul_tflop_per_s"]
    check_keys(f"{where}: matmul_tflop_per_s", rates, dict.fromkeys(DTYPE_BYTES, float), set())
    if not rates:
        raise ConfigError(f"{where}: matmul_tflop_per_s is empty; expected at least one dtype")
    if values["domain_gpus"] < 1:
        raise ConfigError(f"{where}: domain_gpus = {values['domain_gpus']}; expected at least 1")
    outer = values.get("outer")
    return Hardware(
        name=name,
        memory_bytes=int(positive(where, values, "memory_mib") * 2**20),
        memory_bytes_per_s=positive(where, values, "memory_gbytes_per_s")
        * 1e9
        * share(where, values, "memory_achievable_share"),
        flops={
            dtype: positive(f"{where}: matmul_tflop_per_s", rates, dtype) * 1e12 for dtype in rates
        },
        domain_size=values["domain_gpus"],
        inner=_link(where, "inner", values["inner"]),
        outer=None if outer is None else _link(where, "outer", outer),
        price_per_gpu_hour=values.get("usd_per_gpu_hour"),
    )


def _link(where: str, tier: str, value: str | dict[str, Any]) -> Link:
    if isinstance(value, str):
        fabrics = read_toml(recipes_dir() / "fabrics.toml")
        if value not in fabrics:
            raise ConfigError(
                f"{where}: {tier} = {value!r}; expected one of {', '.join(sorted(fabrics))}"
            )
        value = {"name": value, **fabrics[value]}
    where = f"{where}: {tier}"
    check_keys(where, value, _LINK, {"gbytes_per_s_per_direction", "latency_us"})
    nominal = positive(where, value, "gbytes_per_s_per_direction") * 1e9
    return Link(
        name=value.get("name", tier),
        bytes_per_s=nominal * share(where, value, "achievable_share"),
        latency_s=value["latency_us"] * 1e-6,
        nominal_bytes_per_s=nominal if "achievable_share" in value else None,
        all_to_all_s=_exchanges(f"{where}: all_to_all_us", value.get("all_to_all_us", {})),
    )


def _exchanges(where: str, values: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    sizes = {key: key.removeprefix("bytes_") for key in values}
    if wrong := [k for k, size in sizes.items() if not size.isdecimal() or k == size]:
        raise ConfigError(f"{where}: key {wrong[0]}; expected bytes_N")
    check_keys(where, values, dict.fromkeys(values, float), set())
    return tuple(sorted((int(size), values[key] * 1e-6) for key, size in sizes.items()))


def hardware_toml(values: dict[str, Any], comments: Sequence[str]) -> str:
    """The text of a hardware file, with a comment a line at its head.

    Raises:
        ConfigError: `load_hardware` would not read it.
    """
    parse_hardware(values, "measured", "measured values")
    lines = [f"# {comment}" for comment in comments]
    return "\n".join([*lines, *_toml(values, ())]) + "\n"


def _toml(values: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Plain values first, then each table under its heading."""
    lines = [f"{k} = {_literal(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for key, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{'.'.join((*path, key))}]", *_toml(table, (*path, key))]
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_literal(v) for v in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
