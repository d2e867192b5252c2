"""What a device reaches at best, as measured: what MFU and MBU are shares of."""

import re
from dataclasses import dataclass
from pathlib import Path

from crossdock.core.errors import ConfigError
from crossdock.core.recipes import find_recipe, positive, read_toml, recipe_names, share

FP8 = "float8_e4m3fn"
_OTHERS = {"pcie", "nvl"}
"""Cards that share a name with a faster one."""


@dataclass(frozen=True)
class Ceilings:
    """`flops_per_s`: dense matrix products at a large shape, in the dtype of the weights;
    `bytes_per_s`: of a large copy, read and written. `source`: where they are from."""

    flops_per_s: float
    bytes_per_s: float
    source: str


def read_rows(expert_bytes: int, flops_per_row: int, ceilings: Ceilings | None) -> float:
    """Rows whose products with an expert take as long as reading its weights; 0: unknown."""
    if ceilings is None:
        return 0.0
    return expert_bytes / ceilings.bytes_per_s * ceilings.flops_per_s / flops_per_row


def ceilings_of(hardware: str, dtype: str) -> Ceilings:
    """
    Args:
        hardware: a shipped kind by name, or a file that `crossdock check --measure` wrote.

    Raises:
        ConfigError: no such name or file, it does not know the dtype, or a rate is none.
    """
    path: Path | None = Path(hardware).expanduser()
    if path is None or not path.is_file():
        path = find_recipe("hardware", hardware)
    if path is None:
        raise ConfigError(
            f"no hardware {hardware!r}: neither a file nor one of "
            f"{', '.join(recipe_names('hardware'))}"
        )
    values = read_toml(path)
    where, table = str(path), "matmul_tflop_per_s"
    try:
        if not isinstance(values[table], dict):
            raise ConfigError(f"{where}: {table} = {values[table]!r}; expected a table by dtype")
        flops = positive(f"{where}: {table}", values[table], dtype) * 1e12
        memory = positive(where, values, "memory_gbytes_per_s") * 1e9
        return Ceilings(flops, memory * share(where, values, "memory_achievable_share"), path.name)
    except KeyError as error:
        raise ConfigError(
            f"{path}: no {error.args[0]}; `crossdock check --measure FILE` writes such a file"
        ) from None


def shipped_ceilings(device_name: str, dtype: str) -> Ceilings | None:
    """Of a GPU by what the driver calls it; None for one that is not shipped, or whose description
    does not know the dtype: nobody asked for either."""
    kind = hardware_of(device_name)
    path = None if kind is None else find_recipe("hardware", kind)
    if path is None or dtype not in read_toml(path)["matmul_tflop_per_s"]:
        return None
    return ceilings_of(str(path), dtype)


def hardware_of(device_name: str) -> str | None:
    """The shipped kind of a GPU by what the driver calls it, such as "NVIDIA H200"; None for one
    that is not shipped."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHERS:
        return None
    return next((k for k in recipe_names("hardware") if k.split("-")[0] in words), None)
