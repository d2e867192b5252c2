"""Whether FlashInfer (arXiv 2501.01005; the `flashinfer` extra) has kernels for a model on this
GPU, and those kernels, compiled."""

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from crossdock.core import GQASpec, MLASpec

log = logging.getLogger(__name__)

VERSIONS = "0.6."
"""Others lay out their work with other arguments, or leave more to the caller."""
HEADS_WORTH = 64
"""Its MLA decode takes 64 rows of one sequence, a head each, at a time: with fewer heads it
multiplies empty rows."""


@dataclass(frozen=True)
class AttentionCase:
    """What attention is chosen for: a rank's share of the heads, the scale of the scores, and
    whether the cache is in FP8."""

    spec: GQASpec | MLASpec
    scale: float
    fp8_cache: bool


def why_not_flashinfer(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> str | None:
    """None: it can run. Compiles its kernels, unless that was done before."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return 'it is not installed (pip install "crossdock[flashinfer]")'
    if not found.startswith(VERSIONS):
        return f"flashinfer-python {found} is installed, not {VERSIONS}*"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"its kernels for Hopper cannot run on {torch.cuda.get_device_name(device)}"
    against = _unserved(case)
    if against is not None:
        return against
    try:
        _compile(case.spec, dtype)
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"it cannot be imported or compiled: {first}"
    return None


def why_rather_not(case: AttentionCase) -> str | None:
    """Where it can run and Triton's kernels are taken all the same, unless it is named."""
    if isinstance(case.spec, MLASpec) and case.spec.num_heads < HEADS_WORTH:
        return (
            f"its MLA decode pays from {HEADS_WORTH} heads of a rank on, not {case.spec.num_heads}"
        )
    return None


def load_flashinfer() -> Any:
    import flashinfer

    return flashinfer


def _unserved(case: AttentionCase) -> str | None:
    s = case.spec
    if case.fp8_cache:
        return "our FP8 cache has a scale a row, which it does not read"
    if isinstance(s, MLASpec):
        if (s.kv_lora_rank, s.qk_rope_head_dim) != (512, 64):
            return f"it has no MLA of {s.kv_lora_rank} + {s.qk_rope_head_dim}, only 512 + 64"
    elif s.sliding_window is not None:
        return "sliding windows are left to Triton's kernels"
    elif s.head_dim not in (64, 128, 256):
        return f"it has no heads of {s.head_dim}, only 64, 128 and 256"
    return None


def _compile(spec: GQASpec | MLASpec, dtype: torch.dtype) -> None:
    from flashinfer.jit import gen_batch_mla_module, gen_batch_prefill_module

    types = (dtype, dtype, dtype, torch.int32)  # queries, cache, outputs, indices
    if isinstance(spec, MLASpec):
        dims = spec.kv_lora_rank, spec.qk_rope_head_dim
        module = gen_batch_mla_module("fa3", *types, *dims, use_profiler=False)
    else:
        module = gen_batch_prefill_module(
            "fa3", *types, spec.head_dim, spec.head_dim, pos_encoding_mode=0,
            use_sliding_window=False, use_logits_soft_cap=False, use_fp16_qk_reduction=False,
        )  # fmt: skip
    if not (module.is_aot or module.is_compiled):
        log.warning("FlashInfer's %s is compiled now: minutes, once", module.name)
    module.build_and_load()
