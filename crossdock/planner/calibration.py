"""The few numbers of the cost model that were fitted or measured, each with its reason.

Everything else follows from shapes, links and rates. Those marked *fitted* are the least squares of
the logarithms of predicted over published, over the rows that `recipes/validation/rows.toml` marks
`calibration`, rounded; the others are taken from what is cited.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    roofline_power: float = 3.0
    """Time of a product from its arithmetic a and its traffic b: (a^p + b^p)^(1/p). Grouped FP8
    products on an H200 with 16 to 1,024 rows a slot lie within 5% of it."""
    expert_tile: int = 64
    """Rows that a grouped product computes at least of a slot; its last tile is half empty."""
    sustained_share: float = 0.75
    """*Fitted.* Of the arithmetic rate of one kernel timed alone, what a whole model reaches: power
    limits, uneven shapes, tails between kernels."""
    attention_efficiency: float = 0.75
    """Of the rate of products, in the attention kernel timed alone: FlashAttention-3 on causal
    prompts and absorbed MLA decode were published at 550 to 660 TFLOP/s on Hopper."""
    layer_overhead_s: float = 170e-6
    """*Fitted.* Of one layer: some twenty small kernels (norms, rope, quantisation, top-k,
    permutations), and waiting for the slowest rank twice."""
    elementwise_passes: float = 30.0
    """Times a token's hidden row of 2 bytes an element is read or written per layer outside the
    products: norms, residuals, quantisation, queries, expanded keys and values, counted on
    DeepSeek-V3."""
    step_overhead_s: float = 2e-3
    """Of one step: sampling, the exchange between ranks, the first launch."""
    synchronous_s: float = 6.1e-3
    """Of one step more where scheduling is not overlapped: LMSYS's 51.0 against 60.4 tokens per
    second of two sequences a rank."""

    normal_efficiency: float = 0.87
    """*Fitted.* Of the inner link's rate, rows to the own rank counted: normal mode stages every
    row, own ones too, through its few multiprocessors (DeepEP V1: H20 332 of 378 GB/s, 2 x H200
    331)."""
    normal_overhead_s: float = 60e-6
    """Of one normal-mode exchange in a model, beside the kernel: counts and layout with three
    barriers of 8 to 9 us (2 x H200), the host's wait and the launches after it. A judgement."""
    low_latency_inner_s: float = 17e-6
    low_latency_outer_s: float = 25e-6
    """*Fitted*, both. Of one low-latency exchange beside its bytes and the link's own latency,
    within a domain (NVLink) and beyond it (RDMA)."""
    comm_sms_share: float = 0.15
    """Multiprocessors that normal mode takes from products beside it: 20 of 132 (DeepSeek-V3,
    section 3.2.2)."""
    overlap_efficiency: float = 0.70
    """*Fitted.* Of what an overlap could hide, what it hides: stages are not of equal length, and
    kernels side by side slow each other."""

    real_traffic_imbalance: float = 1.21
    """*Fitted.* Rows of the busiest rank over the mean, of real traffic after balancing: what
    separates LMSYS's prefill of real prompts from that with random routing."""
    real_traffic_zipf: float = 0.61
    """*Fitted.* Exponent of Zipf's law for the experts' loads of real traffic: what makes EPLB
    worth 1.49 times in LMSYS's prefill."""


DEFAULT = Calibration()
