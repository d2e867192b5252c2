"""How one role (prefill, decode, or both) lies over GPUs, and what it is asked to do."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Layout:
    """One instance of a role. Attention runs in `gpus / tp` groups (data parallel); experts lie
    over all `gpus` ("ep"), or are sharded over the `tp` ranks of each group ("tp": priced for
    comparison only)."""

    role: Literal["prefill", "decode", "both"]
    gpus: int
    tp: int = 1
    experts: Literal["ep", "tp"] = "ep"
    redundant_per_rank: int = 0
    mode: Literal["normal", "low_latency"] = "normal"
    overlap: Literal["off", "sbo", "tbo"] = "off"
    max_tokens_per_rank: int = 8192
    """Of one step, per GPU: what the transport's buffers and the activations are sized for."""
    weights_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def dp(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True)
class Workload:
    """`isl`, `osl`: prompt and output tokens of a request; limits in seconds, None: no limit."""

    isl: int
    osl: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    request_rate: float | None = None
    """Requests per second over the whole deployment; None: as many as it can."""
    zipf: float = 0.0
    """Skew of the experts' loads: the i-th most popular has a share proportional to i**-zipf."""
