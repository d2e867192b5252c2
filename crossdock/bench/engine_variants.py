"""Which engines `bench engine` compares, and with what settings each of them starts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crossdock.bench.ranks import visible_gpus
from crossdock.core import ConfigError, EngineConfig

COMPARED: dict[str, tuple[str, ...]] = {
    "transport": ("collective",),
    "graphs": ("off",),
    "dispatch-mode": ("normal", "low_latency"),
    "overlap": ("off", "sbo", "tbo"),
    "tp": ("2",),
    "kv-cache-dtype": ("fp8",),
}
"""What may differ from the default, and how."""


@dataclass(frozen=True)
class EngineOptions:
    """`ranks`, `threads` (per rank) and `tp` (ranks of an attention group) of the same length, or
    of length 1.

    `overlap`: modes to compare. `compare`: as `parse_compared` gives it; engines that differ from
    the first in that alone. `anchors`: names of loads of `recipes/anchors.toml`, or "all", in place
    of `num_prompts`, `input_len`, `output_len`; `settings` should hold theirs. `trace`: where a
    timeline of the first variant's first steps goes. `settings`: further fields of `EngineConfig`.
    `target`: the ratio to reach, to transformers if that runs too, else to the first of ours.
    """

    model: str
    ranks: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    tp: tuple[int, ...] = (1,)
    invariant: bool = False
    overlap: tuple[str, ...] = ("auto",)
    compare: tuple[tuple[str, str], ...] = ()
    vs_transformers: bool = False
    anchors: tuple[str, ...] = ()
    num_prompts: int = 32
    input_len: tuple[int, int] = (20, 200)
    output_len: int = 64
    prompts_file: Path | None = None
    repeats: int = 5
    target: float | None = None
    trace: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One engine of the comparison. `ranks` 0: transformers. `changed`: (what, how) differs from
    the first of the comparison, alone. `again`: the first once more, when all others have run."""

    ranks: int
    threads: int
    invariant: bool = False
    overlap: str = "auto"
    tp: int = 1
    changed: tuple[str, str] | None = None
    again: bool = False

    @property
    def name(self) -> str:
        who = f"{self.ranks} rank" + "s" * (self.ranks > 1) if self.ranks else "transformers"
        parts = [who, f"{self.threads} thread" + "s" * (self.threads > 1)]
        parts += [f"tp {self.tp}"] * (self.tp != 1)
        parts += ["invariant"] * self.invariant
        parts += [f"overlap {self.overlap}"] * (self.overlap != "auto")
        parts += [" ".join(self.changed)] if self.changed else []
        parts += ["again at the end"] * self.again
        return ", ".join(parts)


def parse_compared(text: str) -> tuple[tuple[str, str], ...]:
    """`"all"`, or a comma list of NAME (all its other values) and NAME=VALUE.

    Raises:
        ConfigError: an unknown name or value; lists the known ones.
    """
    found: list[tuple[str, str]] = []
    for word in COMPARED if text == "all" else text.split(","):
        name, given, value = word.partition("=")
        if name not in COMPARED or (given and value not in COMPARED[name]):
            known = "; ".join(f"{n}={'|'.join(v)}" for n, v in COMPARED.items())
            raise ConfigError(f"--compare {word!r}: expected all, or a list of {known}")
        found += [(name, each) for each in ((value,) if given else COMPARED[name])]
    return tuple(dict.fromkeys(found))


def variants_of(options: EngineOptions) -> tuple[Variant, ...]:
    """Ours in the order asked for, each in every overlap mode and followed by its invariant twins;
    then those of `compare` and the first again; then transformers."""
    given = options.ranks, options.threads, options.tp
    many = max(map(len, given))
    if set(map(len, given)) - {1, many}:
        r, t, tp = map(len, given)
        raise ConfigError(
            f"--ranks has {r} values, --threads {t} and --tp {tp}: give as many of each, or one"
        )
    found: list[Variant] = []
    for r, t, tp in zip(*(v * many if len(v) == 1 else v for v in given), strict=True):
        for invariant in (False, True)[: 1 + options.invariant]:
            found += [Variant(r, t, invariant, overlap, tp) for overlap in options.overlap]
    if options.compare:
        if len(found) > 1:
            raise ConfigError(
                f"--compare varies one engine, --ranks, --threads, --tp, --overlap and --invariant "
                f"give {len(found)}; leave a single one"
            )
        found += list(_compared(found[0], options))
        found.append(replace(found[0], again=True))
    if options.vs_transformers:
        found.append(Variant(0, options.threads[0]))
    if len(set(found)) < len(found):
        raise ConfigError("the same --ranks, --threads, --tp and --overlap are there twice")
    return tuple(found)


def _compared(first: Variant, options: EngineOptions) -> Iterator[Variant]:
    for what, how in options.compare:
        if (what, how) not in (("overlap", first.overlap), ("tp", str(first.tp))):
            yield replace(first, changed=(what, how))


def on_gpus(options: EngineOptions) -> bool:
    device = EngineConfig(options.model, **options.settings).device
    return device == "cuda" or (device == "auto" and visible_gpus() > 0)


def engine_settings(options: EngineOptions, variant: Variant) -> dict[str, Any]:
    """Of one of ours.

    Raises:
        ConfigError: what no engine could start with.
    """
    settings = {
        **options.settings,
        "model": options.model,
        "ranks": variant.ranks,
        "threads": variant.threads,
        "tp": variant.tp,
        "invariant": variant.invariant,
        "overlap": variant.overlap,
        "prefix_caching": False,
        **_change(options, variant),
    }
    EngineConfig(**settings)
    return settings


def _change(options: EngineOptions, variant: Variant) -> dict[str, Any]:
    match variant.changed:
        case None:
            return {}
        case ("graphs", _):
            return {"enforce_eager": True}
        case ("tp", how):
            # It counts those of a group, of which there are fewer now.
            running = options.settings.get("max_num_seqs", 0) * int(how) // variant.tp
            return {"tp": int(how), **({"max_num_seqs": running} if running else {})}
        case (what, how):
            return {what.replace("-", "_"): how}


def child_of(options: EngineOptions, variant: Variant) -> tuple[str, dict[str, Any]]:
    """`(module, settings)` of the child that runs `variant`."""
    if variant.ranks:
        return "crossdock.bench.engine_ours", engine_settings(options, variant)
    config = EngineConfig(model=options.model, **options.settings)
    config = config.for_device("cuda" if on_gpus(options) else "cpu")
    return "crossdock.bench.engine_transformers", {
        "model": options.model,
        "revision": config.revision,
        "device": config.device,
        "dtype": config.dtype,
        "threads": variant.threads,
        "batch": config.max_num_seqs,
    }
