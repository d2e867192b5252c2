"""Starting an engine on this host: `launch(config)` gives a client whose ranks are ready."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossdock.balance import slots_per_rank
from crossdock.comm import (
    Board,
    SharedMemory,
    counts_bytes,
    group_bytes,
    has_total_store_order,
    host_copies_bytes,
    nvlink_reaches,
    resolve_device,
    resolve_transport,
    shm_bytes,
)
from crossdock.comm.world import COUNTS, GROUP, SHM
from crossdock.core import EngineConfig, ModelSpec, UserError, check_tp
from crossdock.core.ceilings import FP8, ceilings_of
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.core.recipes import find_recipe
from crossdock.core.staging import MAX_TOP_K, SCALE_BLOCK, Staging, fp8_expert_bytes
from crossdock.engine import (
    check_overlap,
    initial_placement,
    read_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from crossdock.engine.group import exchanged_bytes
from crossdock.engine.quantize import asks_for_fp8, runs_in_fp8, why_not_fp8, wire_hidden
from crossdock.launch.client import EngineClient, OnProgress
from crossdock.models.byte_tokenizer import ByteTokenizer
from crossdock.models.generation_config import sampling_defaults
from crossdock.models.hub import resolve_model
from crossdock.models.tokenizer import Tokenizer, holds_tokenizer, load_tokenizer

log = logging.getLogger(__name__)
_SILENCE_S = 600.0
"""How long no rank may say anything while they load before the start is called failed."""


def launch(config: EngineConfig, on_progress: OnProgress | None = None) -> EngineClient:
    """Starts `config.ranks` processes and returns once all are ready.

    Raises:
        UserError: the model, a setting or the memory; the message says what to change.
        CrossdockError: a rank failed for another reason.
    """
    name, model_dir = config.model, find_model(config)
    config = replace(config, model=str(model_dir))
    spec = read_spec(config)
    config = resolve(config, spec)
    initial_placement(config, spec)  # refuses an impossible one before anything is started
    check_overlap(config, spec)
    if config.altering:
        said = ", ".join(f"{name} = {value:g}" for name, value in config.altering.items())
        log.warning("answers depend on what else is served: %s", said)
    assert config.max_model_len is not None
    memories = _memories(config, spec)
    try:
        fds = {name: memory.fd for name, memory in memories.items()}
        client = EngineClient(config, spec, config.max_model_len, name, fds, on_progress)
    finally:
        for memory in memories.values():
            memory.close_fd()
    try:
        client.tokenizer = find_tokenizer(config)
        if config.sampling_defaults == "model":
            client.sampling_defaults = sampling_defaults(model_dir)
        client.wait_ready(_SILENCE_S, Board(0, config.ranks, memories[SHM]))
    except BaseException:
        client.close()
        raise
    return client


def find_model(config: EngineConfig) -> Path:
    """The directory of the model; with load = "dummy" also the file of a config.json, or what is
    shipped under that name.

    Raises:
        UserError: neither; says what to do.
    """
    path = Path(config.model)
    if config.load == "dummy" and path.suffix == ".json":
        return path
    if len(path.parts) == 1 and not path.is_dir():
        shipped = find_recipe("models", config.model)
        if shipped is not None and shipped.suffix == ".json":
            if config.load == "dummy":
                return shipped
            raise UserError(
                f"{config.model}: shipped as a config.json without weights; give a checkpoint's "
                'directory or Hugging Face id, or load = "dummy" for random weights'
            )
    return resolve_model(config.model, config.revision)


def find_tokenizer(config: EngineConfig) -> Tokenizer:
    """The model's own; bytes for one of random weights that has none."""
    model = Path(config.model)
    if config.load == "dummy" and not holds_tokenizer(model):
        return ByteTokenizer()
    return load_tokenizer(model)


def resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Everything derived is derived here, once, so that all ranks are told the same.
    `config.model` is a path by now.

    Raises:
        ConfigError: what does not go together.
    """
    device = resolve_device(config.device, 0, config.ranks).type
    config = config.for_device(device)
    nvlink = device == "cuda" and _nvlink_serves(config, spec)
    dtype = resolve_dtype(config, spec, device)
    transport = resolve_transport(config.transport, config.ranks, device, nvlink)
    place = torch.device(device)
    fp8 = runs_in_fp8(config, spec, place, dtype, transport)
    if spec.quant is not None and not fp8:
        why = "as asked" if config.quantize == "none" else None
        why = why or why_not_fp8(config, spec, place, dtype, transport)
        log.info("weights are dequantised to %s: %s", dtype, why)
    check_tp(spec, config.tp, SCALE_BLOCK if fp8 else None)
    if config.hardware is not None:
        ceilings_of(config.hardware, FP8 if fp8 else dtype)  # refuses an unknown one
    derived: dict[str, Any] = {
        "device": device,
        "quantize": "fp8" if fp8 else "none",
        "transport": transport,
        "dtype": dtype,
        "max_model_len": resolve_max_model_len(config, spec),
    }
    return replace(config, **derived)


def _memories(config: EngineConfig, spec: ModelSpec) -> dict[str, SharedMemory]:
    """By the names under which ranks find them."""
    nbytes = {SHM: _shared_bytes(config, spec)}
    shared = config.device == "cpu" and config.transport in ("shm", "nvlink")
    if config.replica_choice == "quota" and shared:
        nbytes[COUNTS] = counts_bytes(config.ranks, spec.moe.num_experts)
    if config.tp > 1 and config.device == "cpu" and has_total_store_order():
        largest = exchanged_bytes(config, spec, DTYPE_BYTES[config.dtype])
        nbytes[GROUP] = group_bytes(config.ranks, largest)
    return {name: SharedMemory.create(count) for name, count in nbytes.items()}


def _nvlink_serves(config: EngineConfig, spec: ModelSpec) -> bool:
    # FP8 pads rows to whole blocks.
    whole = spec.hidden_size % SCALE_BLOCK == 0 or asks_for_fp8(config, spec)
    fits = whole and spec.moe.top_k <= MAX_TOP_K
    return fits and nvlink_reaches(config.ranks)


def _shared_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Control board and lockstep, the buffers of the shm transport where it is used, and, at the
    end, the staging of experts on the move."""
    copies = 0
    if config.rebalance != "off" and config.device == "cpu":
        slots = slots_per_rank(spec.moe.num_experts, config.ranks, config.redundant_experts)
        nbytes = spec.expert_params * DTYPE_BYTES[config.dtype]
        if config.quantize == "fp8":
            nbytes = fp8_expert_bytes(spec.hidden_size, spec.moe.intermediate_size)
        copies = host_copies_bytes(config.ranks, slots, nbytes)
    most_tokens = min(config.rank_tokens, config.max_dispatch_tokens)
    if config.transport == "nvlink" and config.device == "cpu":  # in Triton's interpreter
        copies += config.ranks * interpreted_bytes(config, spec)
    if config.transport != "shm":
        return shm_bytes(config.ranks) + copies
    return copies + shm_bytes(
        config.ranks,
        most_tokens,
        spec.hidden_size,
        spec.moe.top_k,
        DTYPE_BYTES[config.dtype],
        config.invariant,
    )


def interpreted_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Of the symmetric buffers of a CPU rank, for both modes of the nvlink transport."""
    fp8 = config.quantize == "fp8"
    hidden, itemsize = wire_hidden(spec, fp8), DTYPE_BYTES[config.dtype]
    most_tokens = min(config.rank_tokens, config.max_dispatch_tokens)
    few = min(most_tokens, config.low_latency_tokens)
    return sum(
        Staging(
            config.ranks, tokens, hidden, spec.moe.top_k, itemsize, fp8, config.invariant,
            config.low_latency_tokens,
        ).nbytes
        for tokens in {most_tokens, few}
    )  # fmt: skip
