"""The placement an engine starts with: experts in order, left-over slots hold replicas."""

import numpy as np

from crossdock.core import ConfigError, Placement


def slots_per_rank(num_experts: int, num_ranks: int, redundant: int | None) -> int:
    """Physical slots of a rank. `redundant` None takes the fewest that hold every expert.

    Raises:
        ConfigError: an explicit `redundant` that leaves ranks without a slot or does not divide;
            names the nearest values that work.
    """
    if redundant is None:
        return -(-num_experts // num_ranks)
    slots = num_experts + redundant
    if slots % num_ranks == 0:
        return slots // num_ranks
    below = (slots // num_ranks) * num_ranks - num_experts
    above = -(-slots // num_ranks) * num_ranks - num_experts
    nearest = f"{below} or {above}" if below >= 0 else str(above)
    what = "more ranks than slots" if slots < num_ranks else "the slots do not divide"
    raise ConfigError(
        f"redundant_experts {redundant}: {num_experts} + {redundant} = {slots} slots over "
        f"{num_ranks} ranks: {what}; nearest values that work: {nearest}"
    )


def linear_placement(
    num_layers: int, num_experts: int, num_ranks: int, redundant: int | None = None
) -> Placement:
    """Slot p holds expert p; slots from E on hold the experts again from 0.

    Args:
        num_layers: MoE layers, all placed alike.
    """
    slots = slots_per_rank(num_experts, num_ranks, redundant) * num_ranks
    row = np.arange(slots) % num_experts
    return Placement(0, np.tile(row, (num_layers, 1)), num_experts, num_ranks)
