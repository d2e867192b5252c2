"""What communication alone allows: the published bound of EP decode, and EP beside TP by size."""

from collections.abc import Iterable
from dataclasses import dataclass

from crossdock.core import ModelSpec
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.cost.network import Mode, all_reduce_s, exchange_s, spread
from crossdock.planner.hardware import Hardware


@dataclass(frozen=True)
class SpeedLimit:
    """`exchange_s`: dispatch and combine of one layer; `token_s`: a token through all layers."""

    exchange_s: float
    token_s: float

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s


def speed_limit(
    bytes_per_s: float,
    *,
    tokens: int = 32,
    experts: int = 9,
    hidden: int = 7000,
    layers: int = 61,
    dispatch_bytes: int = 1,
    combine_bytes: int = 2,
    micro_batches: int = 2,
) -> SpeedLimit:
    """Time per output token if only links took any: Insights into DeepSeek-V3 (arXiv 2505.09343),
    section 2.3.2, whose values are the defaults.

    Args:
        bytes_per_s: of the link, one direction.
        tokens: of one micro-batch on a device.
        experts: copies of a token's row, the shared expert's counted.
        dispatch_bytes, combine_bytes: of an element.
        micro_batches: whose exchanges follow each other in a layer.
    """
    exchange = (dispatch_bytes + combine_bytes) * tokens * experts * hidden / bytes_per_s
    return SpeedLimit(exchange, micro_batches * exchange * layers)


@dataclass(frozen=True)
class Communication:
    """Of one MoE layer, on one GPU. Bytes sent, by link; seconds of dispatch and combine together,
    or of the all-reduce that sharded experts need."""

    gpus: int
    ep_inner_bytes: float
    ep_outer_bytes: float
    ep_s: float
    tp_bytes: float
    tp_s: float


def communication_table(
    spec: ModelSpec,
    hardware: Hardware,
    sizes: Iterable[int],
    *,
    tokens_per_gpu: float,
    mode: Mode = "normal",
    dispatch_row_bytes: float | None = None,
    calibration: Calibration = DEFAULT,
) -> list[Communication]:
    """EP beside TP over as many GPUs, each bringing `tokens_per_gpu`. Under EP a token's rows grow
    no further than top-k; under TP every GPU sums the rows of all.

    Args:
        dispatch_row_bytes: of one row; default BF16.

    Raises:
        ConfigError: a size spans nodes and the hardware has no network.
    """
    h = spec.hidden_size
    combine_row = 2.0 * h
    dispatch_row = dispatch_row_bytes or combine_row
    table = []
    for gpus in sizes:
        rows = spread(spec.moe, gpus, hardware.domain_size, mode, redundant=False)
        both = tokens_per_gpu * (dispatch_row + combine_row)
        seconds = sum(
            exchange_s(rows, hardware, mode, row, tokens_per_gpu, calibration)
            for row in (dispatch_row, combine_row)
        )
        reduced = tokens_per_gpu * gpus * combine_row
        table.append(
            Communication(
                gpus,
                both * rows.inner,
                both * rows.outer,
                seconds,
                2 * (gpus - 1) / gpus * reduced,
                all_reduce_s(reduced, gpus, hardware),
            )
        )
    return table
