"""How many KV pages a rank gets."""

from dataclasses import dataclass

import torch

from crossdock.comm import free_memory
from crossdock.core import CapacityError, ConfigError, EngineConfig

GIB = 1 << 30
CPU_DEFAULT_BYTES = GIB // 2
"""On a CPU "free memory" belongs to everybody, so the default is a stated amount per rank."""


CPU_EXPERT_BYTES = GIB // 4
"""Enough that pieces cost nothing, and little enough that four ranks do not notice."""


def expert_workspace(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the experts of a rank may hold at once."""
    if device.type == "cpu":
        return CPU_EXPERT_BYTES
    if config.expert_workspace_gib is not None:
        return int(config.expert_workspace_gib * GIB)
    return torch.cuda.get_device_properties(device).total_memory // 20


_FP8_CAPABILITY = (8, 9)


def resolve_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Of the KV cache, where activations are in `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def check_kv_dtype(config: EngineConfig, attention: str, device: torch.device) -> None:
    """
    Raises:
        ConfigError: an FP8 cache where the kernels of `attention` cannot convert it.
    """
    if config.kv_cache_dtype != "fp8" or attention != "triton" or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f'kv_cache_dtype = "fp8": {torch.cuda.get_device_name(device)} does not convert E4M3, '
            'which the attention kernels need it to; set attention = "torch", or leave it out'
        )


@dataclass(frozen=True)
class KVBudget:
    num_pages: int
    num_bytes: int
    reason: str


def kv_budget(
    config: EngineConfig, page_bytes: int, max_model_len: int, device: torch.device
) -> KVBudget:
    """Pages of one rank: the configured memory, or the share of what is free once weights are in.

    Never more than `max_num_seqs` sequences of `max_model_len` could use.

    Raises:
        CapacityError: not even one sequence of `max_model_len` fits; gives the setting that does.
            Or, on a CPU, whose pages are only taken as they are used, more than is free.
    """
    if config.kv_memory_gib is not None:
        room, reason = int(config.kv_memory_gib * GIB), f"kv_memory_gib = {config.kv_memory_gib}"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = int(free - total * (1 - config.gpu_memory_utilization))
        reason = f"gpu_memory_utilization = {config.gpu_memory_utilization}"
    else:
        room, reason = CPU_DEFAULT_BYTES, "default on a CPU: 0.5 GiB a rank"
    per_sequence = -(-max_model_len // config.page_size)
    pages = room // page_bytes
    if pages < per_sequence:
        raise CapacityError(
            f"the KV cache has room for {max(pages, 0) * config.page_size} tokens ({reason}), one "
            f"sequence of max_model_len {max_model_len} needs {per_sequence * page_bytes / GIB:.3f}"
            f" GiB; raise kv_memory_gib to at least {per_sequence * page_bytes / GIB:.3f} or lower "
            f"max_model_len to {max(pages, 0) * config.page_size}"
        )
    most = per_sequence * config.max_num_seqs
    if pages > most:
        pages, reason = most, "max_num_seqs sequences of max_model_len"
    everybodys = pages * page_bytes * config.ranks
    if device.type == "cpu" and everybodys > (free := free_memory()):
        raise CapacityError(
            f"the KV caches of {config.ranks} ranks take {everybodys / GIB:.1f}"
            f" GiB ({reason}), {free / GIB:.1f} GiB are free; lower kv_memory_gib or max_num_seqs"
        )
    return KVBudget(pages, pages * page_bytes, reason)
