"""Starting an engine on this host: `launch(config)` gives a client whose ranks are ready."""

from dataclasses import replace
from typing import Any

from crossdock.balance import slots_per_rank
from crossdock.comm import (
    Board,
    SharedMemory,
    host_copies_bytes,
    nvlink_reaches,
    resolve_device,
    resolve_transport,
    shm_bytes,
)
from crossdock.comm.world import SHM
from crossdock.core import ConfigError, EngineConfig, ModelSpec, load_spec
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.core.staging import MAX_TOP_K, SCALE_BLOCK
from crossdock.engine import initial_placement, resolve_dtype, resolve_max_model_len
from crossdock.launch.client import EngineClient, OnProgress
from crossdock.models.hub import resolve_model
from crossdock.models.tokenizer import load_tokenizer

_SILENCE_S = 600.0
"""How long no rank may say anything while they load before the start is called failed."""


def launch(config: EngineConfig, on_progress: OnProgress | None = None) -> EngineClient:
    """Starts `config.ranks` processes and returns once all are ready.

    Raises:
        UserError: the model, a setting or the memory; the message says what to change.
        CrossdockError: a rank failed for another reason.
    """
    model_dir = resolve_model(config.model, config.revision)
    spec = load_spec(model_dir)
    name, config = config.model, _resolve(replace(config, model=str(model_dir)), spec)
    initial_placement(config, spec)  # refuses an impossible one before anything is started
    memory = SharedMemory.create(_shared_bytes(config, spec))
    assert config.max_model_len is not None
    try:
        fds = {SHM: memory.fd}
        client = EngineClient(config, spec, config.max_model_len, name, fds, on_progress)
    finally:
        memory.close_fd()
    try:
        client.tokenizer = load_tokenizer(model_dir)
        client.wait_ready(_SILENCE_S, Board(0, config.ranks, memory))
    except BaseException:
        client.close()
        raise
    return client


def _resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Everything derived is derived here, once, so that all ranks are told the same."""
    device = resolve_device(config.device, 0, config.ranks).type
    if device == "cuda" and config.invariant:
        raise ConfigError("invariant mode runs on CPU ranks only; set device = 'cpu'")
    nvlink = device == "cuda" and _nvlink_serves(config, spec)
    derived: dict[str, Any] = {
        "device": device,
        "transport": resolve_transport(config.transport, config.ranks, device, nvlink),
        "dtype": resolve_dtype(config, spec, device),
        "max_model_len": resolve_max_model_len(config, spec),
    }
    return replace(config, **derived)


def _nvlink_serves(config: EngineConfig, spec: ModelSpec) -> bool:
    fits = spec.hidden_size % SCALE_BLOCK == 0 and spec.moe.top_k <= MAX_TOP_K
    return fits and nvlink_reaches(config.ranks)


def _shared_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Control board and lockstep, the buffers of the shm transport where it is used, and, at the
    end, the staging of experts on the move."""
    copies = 0
    if config.rebalance != "off" and config.device == "cpu":
        slots = slots_per_rank(spec.moe.num_experts, config.ranks, config.redundant_experts)
        nbytes = spec.expert_params * DTYPE_BYTES[config.dtype]
        copies = host_copies_bytes(config.ranks, slots, nbytes)
    if config.transport != "shm":
        return shm_bytes(config.ranks) + copies
    return copies + shm_bytes(
        config.ranks,
        min(config.max_num_batched_tokens, config.max_dispatch_tokens),
        spec.hidden_size,
        spec.moe.top_k,
        DTYPE_BYTES[config.dtype],
        config.invariant,
    )
