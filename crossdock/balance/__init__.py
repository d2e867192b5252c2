"""Which expert sits in which slot: pure functions over numpy arrays."""

from crossdock.balance.linear import linear_placement, slots_per_rank

__all__ = ["linear_placement", "slots_per_rank"]
