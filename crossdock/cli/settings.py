"""From a configuration file and flags to the engine's and the server's settings. Flags win."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from crossdock.core import EngineConfig, ServerConfig
from crossdock.core.config import load_toml, split_settings
from crossdock.core.env import read_env

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory or id.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file with further settings; flags win over it."),
]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Expert-parallel ranks. [default: 1]")]
TP = Annotated[
    int | None,
    typer.Option("--tp", help="Ranks that share attention and its requests: 1, 2, 4. [default: 1]"),
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda. [default: auto]")]
Invariant = Annotated[
    bool | None,
    typer.Option(
        "--invariant/--no-invariant",
        help="Never let ranks or other requests change an answer's bits. [default: off]",
        show_default=False,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="fp8: on a GPU, also of a BF16 checkpoint; none: never. [default: as the checkpoint]",
    ),
]
KVCacheDtype = Annotated[
    str | None,
    typer.Option("--kv-cache-dtype", help="fp8: half the bytes of BF16. [default: as activations]"),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face id.")
]


def gather(config: Path | None, **flags: Any) -> tuple[EngineConfig, ServerConfig]:
    """Flags that are None were not given.

    Raises:
        ConfigError: names the file, line and key, or the setting.
    """
    engine, server = settings(config, **flags)
    made = ServerConfig(**server)
    if made.api_key is None:
        made = replace(made, api_key=read_env().api_key)
    return EngineConfig(**engine), made


def settings(config: Path | None, **flags: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `gather`, still keyword arguments."""
    values = load_toml(config) if config is not None else {}
    values |= {name: value for name, value in flags.items() if value is not None}
    return split_settings(values)
