"""The settings of an engine, and reading them from a TOML file."""

import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from crossdock.core.errors import ConfigError

TP_SIZES = (1, 2, 4)
_MOST = 10**9
"""Of anything. Clocks that wait overflow at 2**63 ns, and NVLink kernels count in those."""
_MOST_RANKS = 1024
"""Processes of one host."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything a rank needs to know; equal on all ranks. None means: derived at the start."""

    model: str
    """A Hugging Face directory or id."""
    revision: str | None = None
    load: Literal["checkpoint", "dummy"] = "checkpoint"
    """dummy: random weights from config.json alone, or from the name of a shipped one."""
    layers: int | None = None
    """Only the first so many layers of the model; for measuring a slice of it."""
    routing: str = "real"
    """real, or for measuring: uniform, or zipf:A, experts drawn at random by popularity."""
    ranks: int = 1
    tp: int = 1
    """Ranks of an attention group: attention and dense layers are split over them, the group's
    requests are theirs together, and each sends its share of the tokens to the experts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, the checkpoint's own on a GPU."""
    transport: Literal["auto", "local", "collective", "shm", "nvlink"] = "auto"
    attention: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    """auto: on CUDA in 16 bits FlashInfer's kernels where it is installed and has some for the
    model, beside our Triton kernels; Triton's alone where not; else torch."""
    max_dispatch_tokens: int = 8192
    """Tokens of a rank that travel to experts at once; steps with more send them in pieces. Halves
    of 8,192 took 9% longer on two H200, and half the buffers."""
    dispatch_mode: Literal["auto", "normal", "low_latency"] = "auto"
    """nvlink, for measuring: how rows travel in every step, whatever its size."""
    low_latency_tokens: int = 256
    """nvlink: steps in which no rank has more tokens send them with low latency."""
    expert_workspace_gib: float | None = None
    """What the experts of a GPU may hold at once; more received rows are worked on in waves. None:
    a twentieth of its memory, which on eight H200 spares steps of 8,192 tokens a rank the waves,
    and the sums between them, of models with 2,048 channels; with 7,168 they take three."""
    enforce_eager: bool = False
    """No CUDA graphs: the host launches every kernel of every step."""
    overlap: Literal["auto", "off", "sbo", "tbo"] = "auto"
    """What a step does while rows travel between ranks: nothing (off), the shared expert (sbo),
    or another half of the batch (tbo). auto: what measured faster at the start, by size."""
    quantize: Literal["auto", "none", "fp8"] = "auto"
    """Products and experts in FP8, in blocks of 128x128: auto where the checkpoint is and a GPU
    runs it, else dequantised; fp8 quantises others as they are loaded; none never."""
    fp8_experts: Literal["triton", "deepgemm"] = "triton"
    """Products of FP8 experts: our own kernels, or DeepGEMM where it is installed."""
    redundant_experts: int | None = None
    """Physical slots beyond one per expert, per layer. None: as few as the ranks need."""
    replica_choice: Literal["hash", "nearest", "quota"] = "hash"
    """Which of an expert's copies serves a token: by a hash; one on its own rank, else on its own
    node; or so that ranks are loaded evenly in this very step, which costs an exchange a layer."""
    expert_capacity: float | None = None
    """Changes answers: an expert's tokens in a step, of a rank, over the mean of experts; the
    lowest-weighted ones beyond are dropped. None: no limit."""
    router_bias_step: float | None = None
    """Changes answers: after each load window routers prefer experts with less than the mean load
    by so much more, in units of their scores, and the others by so much less. None: never."""
    router_bias_max: float = 0.1
    """How far that may go from the model's own bias."""
    rebalance: Literal["off", "manual", "auto"] = "off"
    """Moving experts to other slots while serving: never, when asked, or when it pays."""
    rebalance_step_mib: float = 16.0
    """Bytes of experts that a rank sends in a step while it moves some."""
    rebalance_policy: Literal["sticky", "eplb", "quota", "llep"] = "sticky"
    """What plans a placement, where a request to rebalance names no other. The last two place for
    copies that share unevenly: only with replica_choice = "quota"."""
    rebalance_interval_s: float = 60.0
    """How often loads are looked at, and the least time between two moves by itself."""
    rebalance_threshold: float = 1.1
    """The fullest rank's load over the mean (mean of the layers) from which a move is considered.
    """
    invariant: bool = False
    threads: int = 1
    """CPU threads of a rank; more than one is refused in invariant mode."""
    max_num_seqs: int = 0
    """Sequences running at once, per attention group (with tp = 1 a rank). 0: 256 on a GPU, 64 on a
    CPU."""
    max_num_batched_tokens: int = 0
    """Tokens per step, per attention group. 0: 8192 on a GPU, 1024 on a CPU."""
    max_model_len: int | None = None
    page_size: int = 16
    kv_memory_gib: float | None = None
    """KV cache of a rank. None: a share of the device's free memory; on the CPU 0.5 GiB a rank."""
    gpu_memory_utilization: float = 0.85
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """auto: as activations. fp8: E4M3 with a scale per token and head (MLA: per latent and per
    rotated key), about half the bytes; see docs/quantization.md for what it costs."""
    prefix_caching: bool = True
    sampling_defaults: Literal["model", "openai"] = "model"
    """Of temperature, top_p, top_k, min_p and repetition_penalty, where a request names none: those
    of the checkpoint's generation_config.json, or 1, 1, 0, 0 and 1."""
    deadline_s: float = 60.0
    """How long a rank waits for another before it is called lost."""
    hardware: str | None = None
    """What MFU and MBU are shares of: a shipped kind of GPU by name, or a file of `crossdock check
    --measure`. None: the GPU's own kind, where it is shipped."""
    load_window_tokens: int = 65536
    """Tokens over which the expert-load gauges are computed, and the routers' bias is adjusted."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(EngineConfig).items():
            if not _fits(getattr(self, name), hint):
                raise ConfigError(f"{name} must be {_describe(hint)}, got {getattr(self, name)!r}")
        for name in (
            "ranks",
            "tp",
            "threads",
            "max_dispatch_tokens",
            "low_latency_tokens",
            "page_size",
            "load_window_tokens",
        ):
            _at_least(name, getattr(self, name), 1)
        if self.ranks > _MOST_RANKS:
            raise ConfigError(f"ranks must be at most {_MOST_RANKS}, got {self.ranks}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 0)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.redundant_experts is not None:
            _at_least("redundant_experts", self.redundant_experts, 0)
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be between -2**63 and 2**64 - 1, got {self.seed}")
        parse_routing(self.routing)
        if self.layers is not None:
            _at_least("layers", self.layers, 1)
        _above_0("rebalance_step_mib", self.rebalance_step_mib)
        _above_0("deadline_s", self.deadline_s)
        _above_0("rebalance_interval_s", self.rebalance_interval_s)
        if self.rebalance_policy in ("quota", "llep") and self.replica_choice != "quota":
            raise ConfigError(
                f'rebalance_policy "{self.rebalance_policy}" needs replica_choice = "quota": its '
                "copies of an expert share unevenly"
            )
        if not self.rebalance_threshold >= 1:
            raise ConfigError(
                "rebalance_threshold must be at least 1 (the fullest rank's load over the mean), "
                f"got {self.rebalance_threshold}"
            )
        for name in ("expert_workspace_gib", "kv_memory_gib"):
            if getattr(self, name) is not None:
                _above_0(name, getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.transport == "local" and self.ranks > 1:
            raise ConfigError(f"transport 'local' serves one rank, not {self.ranks}")
        self._check_altering()
        self._check_tp()
        if self.invariant and self.threads != 1:
            raise ConfigError(f"invariant mode needs threads = 1, got {self.threads}")

    def for_device(self, kind: str) -> "EngineConfig":
        """With what depends on the kind of device, "cuda" or "cpu", where it was not set."""
        seqs, tokens = (256, 8192) if kind == "cuda" else (64, 1024)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )

    @property
    def groups(self) -> int:
        """Attention groups: group g are the ranks g * tp to (g + 1) * tp - 1."""
        return self.ranks // self.tp

    @property
    def rank_tokens(self) -> int:
        """The most tokens of a step that one rank sends to experts."""
        return -(-self.max_num_batched_tokens // self.tp)

    def _check_tp(self) -> None:
        if self.tp not in TP_SIZES:
            raise ConfigError(f"tp must be one of {', '.join(map(str, TP_SIZES))}, got {self.tp}")
        if self.ranks % self.tp:
            counted = "1 rank is" if self.ranks == 1 else f"{self.ranks} ranks are"
            raise ConfigError(
                f"{counted} no multiple of tp = {self.tp}; set ranks to "
                f"{self.ranks - self.ranks % self.tp or self.tp}, or tp to "
                + " or ".join(str(n) for n in TP_SIZES if self.ranks % n == 0)
            )
        if self.tp > 1 and self.invariant:
            raise ConfigError(
                "invariant mode needs tp = 1: split sums round otherwise than whole ones"
            )

    @property
    def altering(self) -> dict[str, float]:
        """The settings that change answers, where they are set."""
        names = ("expert_capacity", "router_bias_step")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _check_altering(self) -> None:
        _above_0("router_bias_max", self.router_bias_max)
        for name, value in self.altering.items():
            _above_0(name, value)
            if self.invariant:
                raise ConfigError(
                    f"{name} makes answers depend on what else is served, which invariant mode "
                    "forbids; leave one of the two out"
                )


def parse_routing(routing: str) -> float | None:
    """The exponent A of experts' popularity, i**-A for the i-th: 0 is uniform; None: real."""
    if routing in ("real", "uniform"):
        return None if routing == "real" else 0.0
    try:
        exponent = float(routing.removeprefix("zipf:"))
        if routing.startswith("zipf:") and 0 <= exponent < 10:
            return exponent
    except ValueError:
        pass
    raise ConfigError(f"routing {routing!r}: expected real, uniform or zipf:A with A from 0 to 10")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP side alone."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    """Asked for by all routes but GET /health, /metrics and /version."""
    max_queue: int | None = None
    """Open sequences, n for each prompt of a request, beyond which the answer is 429. None: twice
    as many as run at once, at least 512."""
    max_body_mib: float = 4.0
    drain_s: float = 30.0
    """How long SIGTERM waits for running requests."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.max_queue is not None:
            _at_least("max_queue", self.max_queue, 1)
        _above_0("max_body_mib", self.max_body_mib)
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be at least 0, got {self.drain_s}")
        _at_most("drain_s", self.drain_s)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
    _at_most(name, value)


def _above_0(name: str, value: float) -> None:
    if not value > 0:  # NaN is not
        raise ConfigError(f"{name} must be above 0, got {value}")
    _at_most(name, value)


def _at_most(name: str, value: float) -> None:
    if value > _MOST:
        raise ConfigError(f"{name} must be at most {_MOST}, got {value}")


def check_settings(settings: Iterable[str]) -> None:
    """Raises ConfigError at the first name that is no field of EngineConfig."""
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"unknown setting {name}{_nearest(name, known)}; known settings: "
                f"{', '.join(sorted(known))}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def load_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, checked against both configs.

    Raises:
        ConfigError: names the file, the line and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    hints = {**get_type_hints(EngineConfig), **get_type_hints(ServerConfig)}
    for key, value in values.items():
        where = f"{path}:{_line_of(text, key)}: {key}"
        if key not in hints:
            raise ConfigError(
                f"{where}: unknown{_nearest(key, hints)}; known keys: {', '.join(sorted(hints))}"
            )
        if not _fits(value, hints[key]):
            raise ConfigError(f"{where}: got {value!r}, expected {_describe(hints[key])}")
    engine, server = split_settings(values)
    for key, value in values.items():
        try:
            if key in server:
                ServerConfig(**{key: value})
            else:
                _check_in_company(key, engine)
        except ConfigError as error:
            raise ConfigError(f"{path}:{_line_of(text, key)}: {key}: {error}") from None
    return values


def _check_in_company(key: str, engine: dict[str, Any]) -> None:
    """Raises ConfigError where `key` is wrong both alone and beside any other key of the file.

    What two keys that are fine alone make together is not looked at: flags may change either.
    """
    try:
        _check_engine({key: engine[key]})
    except ConfigError:
        for other in engine.keys() - {key}:
            with suppress(ConfigError):
                return _check_engine({key: engine[key], other: engine[other]})
        raise


def _check_engine(values: dict[str, Any]) -> None:
    EngineConfig(**{"model": "", "ranks": values.get("tp", 1), **values})  # as many as tp needs


def split_settings(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(engine, server)` keyword arguments."""
    server = {f.name for f in fields(ServerConfig)}
    return (
        {k: v for k, v in values.items() if k not in server},
        {k: v for k, v in values.items() if k in server},
    )


def _line_of(text: str, key: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if line.split("=")[0].strip().strip("[]").split(".")[0].strip(" \"'") == key:
            return number
    return 1


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
