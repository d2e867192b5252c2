"""What times the steps of a rank, and what their work is measured against."""

from dataclasses import asdict
from typing import Any

import torch

from crossdock.core import EngineConfig, ModelSpec
from crossdock.core.ceilings import FP8, Ceilings, ceilings_of, shipped_ceilings
from crossdock.core.step_work import RankWork
from crossdock.metrics import CudaClock, Recorder, StepTimer
from crossdock.metrics.gpu_activity import watch_gpu
from crossdock.models import Decoder


def build_timer(
    config: EngineConfig,
    spec: ModelSpec,
    model: Decoder,
    kv_token_bytes: float,
    recorder: Recorder,
    device: torch.device,
) -> StepTimer:
    """`kv_token_bytes`: of a cached token on this rank, all layers."""
    layers = [layer.slot_tensors() for layer in model.moe_layers]
    experts = sum(tensor.nbytes for tensors in layers for tensor in tensors)
    slots = sum(len(tensors[0]) for tensors in layers)
    # A table of embeddings gives a row to a token; a tied one is read whole, as the head.
    table = 0 if spec.tie_word_embeddings else model.embedding_VH.nbytes
    work = RankWork(
        spec,
        dense_bytes=model.weight_bytes - experts - table,
        expert_bytes=experts // slots if slots else 0,
        kv_bytes=kv_token_bytes,
        tp=config.tp,
    )
    return StepTimer(recorder, work, CudaClock() if device.type == "cuda" else None)


def timing_info(
    config: EngineConfig, recorder: Recorder, device: torch.device, dtype: str, fp8: bool
) -> dict[str, Any]:
    """For a rank's `info`: "ceilings" of `config.hardware`, or of the GPU by its name, None where
    nobody knows them for this dtype; of a GPU "gpu_activity", where that is from or why it is
    missing. Where it is not, the recorder's snapshots have it from now on.

    Raises:
        ConfigError: `config.hardware` is unknown, or knows no such dtype.
    """
    products, said = FP8 if fp8 else dtype, {}
    found: Ceilings | None = None
    if config.hardware is not None:
        found = ceilings_of(config.hardware, products)
    elif device.type == "cuda":
        found = shipped_ceilings(torch.cuda.get_device_name(device), products)
    if device.type == "cuda":
        activity, why = watch_gpu(str(torch.cuda.get_device_properties(device).uuid))
        if activity is not None:
            recorder.source("gpu_activity", activity.read)
        said["gpu_activity"] = why
    return {"ceilings": None if found is None else asdict(found), **said}
