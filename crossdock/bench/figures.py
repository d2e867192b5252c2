"""What was asked of the kernels, and what DeepEP and DeepGEMM took, on two H200 with hidden 7168,
256 experts, top-8 and uniform routing.

DeepEP's figures are stored, not run beside: DeepEP 1.2.1, the best of its own tests' tuning.
"""

DEEP_EP = "DeepEP 1.2.1 (stored anchor)"

COMM_TARGETS = {
    ("dispatch_to_rows", 4096, "bf16"): 200.0,
    ("dispatch_to_rows", 4096, "fp8"): 125.0,
    ("combine_of_reduced", 4096, "bf16"): 210.0,
    ("combine", 4096, "bf16"): 260.0,
    ("dispatch_to_ready", 128, "fp8"): 16.0,
    ("combine", 128, "fp8"): 18.0,
    ("round_trip", 1, "fp8"): 14.0,
}
"""us by what is timed, tokens of a rank and what dispatch sends; rows come home in BF16."""

COMM_STORED = {
    ("dispatch_to_rows", 4096, "bf16"): 355.0,
    ("dispatch_to_rows", 4096, "fp8"): 261.0,
    ("combine_of_reduced", 4096, "bf16"): 427.0,
    ("combine", 4096, "bf16"): 427.0,
    ("dispatch_to_ready", 128, "fp8"): 29.3,
    ("combine", 128, "fp8"): 40.8,
    ("round_trip", 128, "fp8"): 72.5,
}

ASKED_OF = {"ranks": 2, "hidden": 7168, "experts": 256, "top_k": 8}


def asked(device: str, shape: dict[str, object]) -> bool:
    """Whether figures were asked of this device and shape."""
    return "H200" in device and all(shape.get(key) == value for key, value in ASKED_OF.items())


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
