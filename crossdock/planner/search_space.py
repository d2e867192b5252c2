"""Which layouts there are: sizes of an instance, attention groups, replicas, modes, overlaps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from crossdock.core import ModelSpec
from crossdock.planner.alignment import shards
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout

REDUNDANT = (0, 1, 2)
PREFILL_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Per GPU and step."""
LOW_LATENCY_TOKENS = 1024
"""Per GPU and step: low-latency transports size a slot for every token of every rank."""
LARGEST_TP = 16
LARGEST_INSTANCE = 320
"""The widest published (DeepSeek-V3's report, decode)."""
ANY_NUMBER = 1_000_000
"""Of GPUs, where only a request rate is given."""
TP_INSTANCES = (2, 4, 8, 16)
"""Sizes at which experts sharded by tensor parallelism are priced, to compare."""


@dataclass(frozen=True)
class Formats:
    weights_dtype: str
    kv_dtype: str


def instance_sizes(domain: int, gpus: int) -> list[int]:
    """Sizes up to `gpus`: in a domain its divisors (in a large one also multiples of 8 without
    other factors than 2 and 3); beyond it whole domains, a 5-smooth number of them, because
    others seldom divide experts or clusters."""
    inside = [
        n
        for n in range(1, min(domain, gpus) + 1)
        if domain % n == 0 or (n % 8 == 0 and _smooth(n, (2, 3)))
    ]
    outside = [domain * k for k in range(2, gpus // domain + 1) if _smooth(k, (2, 3, 5))]
    return inside + outside


def decode_batches(most: int) -> list[int]:
    """Sequences per attention group: 1 to 8, then four to a doubling, and `most`."""
    grid = {
        quarter * 2**power // 4 for power in range(most.bit_length()) for quarter in range(4, 8)
    }
    return sorted({n for n in grid if n < most} | {most})


def layouts(
    spec: ModelSpec,
    hardware: Hardware,
    gpus: int,
    role: Literal["prefill", "decode"],
    formats: Formats,
) -> Iterator[Layout]:
    """Every layout of one instance of `role`; `max_tokens_per_rank` is left to the batch."""
    modes: tuple[Literal["normal", "low_latency"], ...] = (
        ("normal",) if role == "prefill" else ("normal", "low_latency")
    )
    # Single-batch overlap hides the shared expert; without one there is nothing to run.
    overlaps: tuple[Literal["off", "sbo", "tbo"], ...] = (
        ("off", "sbo", "tbo") if spec.moe.shared_intermediate_size else ("off", "tbo")
    )
    experts, most = spec.moe.num_experts, min(gpus, LARGEST_INSTANCE, 2 * spec.moe.num_experts)
    if hardware.outer is None:
        most = min(most, hardware.domain_size)

    def runs(tp: int, by: Literal["ep", "tp"]) -> bool:
        return all(s.runnable for s in shards(spec, tp, formats.weights_dtype, by))

    for size in instance_sizes(hardware.domain_size, most):
        if role == "prefill" and not _holds_groups(spec, -(-size // hardware.domain_size)):
            continue
        for tp in _tp_sizes(size, hardware.domain_size):
            if not runs(tp, "ep"):
                continue
            for redundant in REDUNDANT if size > 1 else (0,):
                if redundant >= experts:
                    continue
                for mode in modes if size > 1 else ("normal",):
                    for overlap in overlaps if size > 1 else ("off",):
                        yield Layout(
                            role=role,
                            gpus=size,
                            tp=tp,
                            redundant_per_rank=redundant,
                            mode=mode,
                            overlap=overlap,
                            weights_dtype=formats.weights_dtype,
                            kv_dtype=formats.kv_dtype,
                        )
        if size in TP_INSTANCES and runs(size, "tp"):
            yield Layout(
                role=role,
                gpus=size,
                tp=size,
                experts="tp",
                weights_dtype=formats.weights_dtype,
                kv_dtype=formats.kv_dtype,
            )


def _holds_groups(spec: ModelSpec, nodes: int) -> bool:
    """Whether nodes hold whole groups of experts, so that group-limited routing keeps a prompt's
    tokens to few nodes and replicas beside their originals (EPLB's hierarchical policy)."""
    return spec.moe.num_groups == 1 or spec.moe.num_groups % nodes == 0


def _tp_sizes(size: int, domain: int) -> list[int]:
    most = min(size, domain, LARGEST_TP)
    powers = [2**k for k in range(most.bit_length())]
    return [n for n in powers if n <= most and size % n == 0]


def _smooth(n: int, primes: tuple[int, ...]) -> bool:
    for prime in primes:
        while n % prime == 0:
            n //= prime
    return n == 1
