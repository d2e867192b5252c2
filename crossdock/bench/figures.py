"""What was asked of the kernels on H200s with hidden 7168, 256 experts, top-8 and uniform routing,
and what DeepEP and DeepGEMM took on two.

DeepEP's figures are stored, not run beside: DeepEP 1.2.1, the best of its own tests' tuning.
"""

DEEP_EP = "DeepEP 1.2.1 (stored anchor)"

COMM_TARGETS = {
    2: {
        ("dispatch_to_rows", 4096, "bf16"): 200.0,
        ("dispatch_to_rows", 4096, "fp8"): 125.0,
        ("combine_of_reduced", 4096, "bf16"): 210.0,
        ("combine", 4096, "bf16"): 260.0,
        ("dispatch_to_ready", 128, "fp8"): 16.0,
        ("combine", 128, "fp8"): 18.0,
        ("round_trip", 1, "fp8"): 14.0,
    },
    8: {
        ("dispatch_to_rows", 4096, "fp8"): 430.0,
        ("combine_of_reduced", 4096, "bf16"): 850.0,
        ("combine", 4096, "bf16"): 850.0,
        ("dispatch_to_ready", 128, "fp8"): 30.0,
        ("combine", 128, "fp8"): 40.0,
    },
}
"""us by ranks, what is timed, tokens of a rank and what dispatch sends; rows come home in BF16."""
WIRE_TARGETS = {4: 0.75 * 376e9}
"""By ranks: bytes per second on the busiest direction of a link, at 4,096 tokens."""

COMM_STORED = {
    ("dispatch_to_rows", 4096, "bf16"): 355.0,
    ("dispatch_to_rows", 4096, "fp8"): 261.0,
    ("combine_of_reduced", 4096, "bf16"): 427.0,
    ("combine", 4096, "bf16"): 427.0,
    ("dispatch_to_ready", 128, "fp8"): 29.3,
    ("combine", 128, "fp8"): 40.8,
    ("round_trip", 128, "fp8"): 72.5,
}

ASKED_OF = {"hidden": 7168, "experts": 256, "top_k": 8}


def asked(device: str, shape: dict[str, object]) -> bool:
    """Whether figures were asked of this device and shape, whatever its ranks."""
    return "H200" in device and all(shape.get(key) == value for key, value in ASKED_OF.items())


def comm_target(ranks: int, key: tuple[str, int, str], wire_bytes: int | None) -> float | None:
    """us; `key` as in COMM_TARGETS."""
    if ranks in WIRE_TARGETS and wire_bytes and key[1] == 4096 and key in COMM_TARGETS[2]:
        return wire_bytes / WIRE_TARGETS[ranks] * 1e6
    return COMM_TARGETS.get(ranks, {}).get(key)


EXPERT_TARGETS = {
    ("arithmetic", "grouped", 32, 1024): 1100.0,
    ("weights", "masked", 128, 16): 3.8,
}
"""TFLOP/s and TB/s by what, layout, slots and rows of each."""

ATTENTION_TFLOPS = {"decode:mla-128:128x4096": 474.0}
"""60% of the BF16 roof, which binds so many heads on one latent."""
KV_READ_SHARES = {
    "decode:gqa-32/4:128x4096": 70.0,
    "decode:mla-16:128x4096": 70.0,
    "decode:mla-32:128x4096": 70.0,
}
"""Percent of a copy's speed at which decodes read keys and values."""

WEIGHTS_BPS = 4.3e12
"""A copy's bytes per second on an H200, read and written."""
MOE_TARGETS = {
    ("weights", 128, "deepgemm"): 1.15,
    ("weights", 128, "triton"): 1.22,
    ("rest", 4096, "fp8"): 15.0,
}
"""The layer's time over reading its weights once; percent that is neither products nor wire."""
