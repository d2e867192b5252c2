"""What a problem must fulfil before any policy looks at it."""

import numpy as np

from crossdock.balance.base import Problem
from crossdock.core import ConfigError

MAX_LOAD = 1e30
"""What experts pack by in float32 stays within its range."""

MAX_SLOTS = 1 << 20
"""Of a layer."""


def check_problem(problem: Problem) -> None:
    """Raises ConfigError, which names what was given and the nearest values that work."""
    check_loads(problem.load_LE, "load_LE", "[layers, experts]", 2)
    num_layers, num_experts = problem.load_LE.shape
    ranks, per_rank, nodes = problem.num_ranks, problem.slots_per_rank, problem.num_nodes
    for name in ("num_ranks", "slots_per_rank", "num_nodes", "num_groups", "expert_bytes"):
        if getattr(problem, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(problem, name)}")
    slots = ranks * per_rank
    if slots > MAX_SLOTS:
        raise ConfigError(
            f"{ranks} ranks with {per_rank} slots are {slots} slots a layer, expected at most "
            f"{MAX_SLOTS}"
        )
    if slots < num_experts:
        raise ConfigError(
            f"{ranks} ranks with {per_rank} slots hold {slots} of {num_experts} experts; nearest "
            f"values that work: {-(-num_experts // ranks)} slots a rank, or "
            f"{-(-num_experts // per_rank)} ranks"
        )
    if ranks % nodes:
        raise ConfigError(
            f"num_nodes {nodes} does not divide {ranks} ranks; nearest values that work: "
            f"{nearest_multiples(nodes, 1, ranks)}"
        )
    if problem.current_LP is not None:
        check_placement(problem.current_LP, num_layers, num_experts, slots)


def check_loads(load: np.ndarray, name: str, axes: str, dims: int) -> None:
    """Raises ConfigError unless `load` has numbers from 0 to `MAX_LOAD`."""
    if not isinstance(load, np.ndarray) or load.ndim != dims or 0 in load.shape:
        raise ConfigError(f"{name}: expected numbers {axes}, got shape {np.shape(load)}")
    if not (np.issubdtype(load.dtype, np.number) and np.isrealobj(load)):
        raise ConfigError(f"{name}: expected numbers {axes}, got values of type {load.dtype}")
    wrong = ~((load >= 0) & (load <= MAX_LOAD))  # NaN is neither
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ConfigError(
            f"{name}{list(where)} is {load[where]}: a load is a finite number from 0 to "
            f"{MAX_LOAD:g} ({int(wrong.sum())} of {load.size} are not)"
        )


def check_placement(
    slot_expert_LP: np.ndarray, num_layers: int, num_experts: int, num_slots: int
) -> None:
    """Raises ConfigError unless every expert of every layer has a slot."""
    if slot_expert_LP.shape != (num_layers, num_slots):
        given = " x ".join(map(str, slot_expert_LP.shape))
        raise ConfigError(
            f"the current placement is {given}, expected {num_layers} layers x {num_slots} slots"
        )
    if slot_expert_LP.min() < -1 or slot_expert_LP.max() >= num_experts:
        raise ConfigError(f"the current placement names experts outside -1 to {num_experts - 1}")
    for layer, row_P in enumerate(slot_expert_LP):
        missing = np.setdiff1d(np.arange(num_experts), row_P)
        if missing.size:
            raise ConfigError(
                f"the current placement has no slot for expert {missing[0]} in layer {layer}"
            )


def nearest_multiples(value: int, step: int, whole: int) -> str:
    """The divisors of `whole` nearest to `value` from below and above that `step` divides."""
    fits = [n for n in range(1, whole + 1) if whole % n == 0 and n % step == 0]
    near = [max((n for n in fits if n < value), default=0)]
    near += [min((n for n in fits if n > value), default=0)]
    return " or ".join(str(n) for n in near if n) or "none"
