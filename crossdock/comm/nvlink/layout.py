"""What lies where in a rank's symmetric buffer, and what the kernels can serve."""

from dataclasses import dataclass, replace

from crossdock.core import CapacityError
from crossdock.core.staging import LOW_LATENCY_TOKENS, MAX_TOP_K, SCALE_BLOCK, SETS, Staging

__all__ = ["LOW_LATENCY_TOKENS", "SETS", "NvlinkLayout", "nvlink_bytes", "nvlink_layouts"]
_MAX_RANKS, _MAX_TOKENS = 64, (1 << 24) - 1


@dataclass(frozen=True)
class NvlinkLayout(Staging):
    """A `Staging` that the kernels can serve.

    Raises:
        CapacityError: they cannot.
    """

    def __post_init__(self) -> None:
        for name, value, most in (
            ("ranks", self.ranks, _MAX_RANKS),
            ("max_tokens", self.max_tokens, _MAX_TOKENS),
            ("top_k", self.top_k, MAX_TOP_K),
        ):
            if not 1 <= value <= most:
                raise CapacityError(f"the nvlink transport takes {name} 1 to {most}, got {value}")
        if self.hidden % SCALE_BLOCK or self.hidden < SCALE_BLOCK:
            raise CapacityError(
                "the nvlink transport takes a hidden size that is a multiple of "
                f'{SCALE_BLOCK}, got {self.hidden}; set transport = "collective"'
            )


def nvlink_bytes(
    ranks: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    itemsize: int = 2,
    fp8: bool = False,
    per_expert: bool = False,
) -> int:
    """Bytes of symmetric memory that each rank needs."""
    return NvlinkLayout(ranks, max_tokens, hidden, top_k, itemsize, fp8, per_expert).nbytes


def nvlink_layouts(
    ranks: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    itemsize: int = 2,
    fp8: bool = False,
    per_expert: bool = False,
    low_latency_tokens: int = LOW_LATENCY_TOKENS,
    dispatch_mode: str = "auto",
) -> tuple[NvlinkLayout, NvlinkLayout | None]:
    """Of steps with up to `max_tokens` tokens per rank, and of those with few, which travel with
    low latency; None where the first is that already. dispatch_mode "normal": of all steps in that
    mode; "low_latency": of as many tokens at once as that mode takes."""
    if dispatch_mode == "low_latency":
        max_tokens = min(max_tokens, low_latency_tokens)
    if dispatch_mode == "normal":
        low_latency_tokens = 0
    normal = NvlinkLayout(
        ranks, max_tokens, hidden, top_k, itemsize, fp8, per_expert, low_latency_tokens
    )
    if normal.low_latency or dispatch_mode == "normal":
        return normal, None
    return normal, replace(normal, max_tokens=low_latency_tokens)
