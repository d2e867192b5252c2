"""Who takes part and which expert sits where: values with an epoch, passed in, never looked up."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Member:
    """One rank. `id` is stable over epochs; `rank` is its index in this one."""

    id: int
    node: str
    device: str
    role: str = "serve"
    alive: bool = True


@dataclass(frozen=True)
class Topology:
    epoch: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def same_node(self, a: int, b: int) -> bool:
        return self.members[a].node == self.members[b].node


def share_of(tokens: int, size: int, rank: int) -> slice:
    """Which of a batch's tokens are those of one rank of an attention group: as many for each, in
    order, fewer or none for the last ones where `size` does not divide them."""
    each = -(-tokens // size)
    return slice(min(rank * each, tokens), min((rank + 1) * each, tokens))


@dataclass(frozen=True, eq=False)
class Placement:
    """`slot_expert_LP[l, p]`: the logical expert in physical slot p of MoE layer l, -1 if empty.

    L counts MoE layers only. Rank r holds slots r*S to (r+1)*S - 1, where S = P / ranks.
    """

    epoch: int
    slot_expert_LP: np.ndarray
    num_experts: int
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        return self.slot_expert_LP.shape[1] // self.num_ranks

    def local_slots(self, layer: int, rank: int) -> np.ndarray:
        """The experts `[S]` of one rank in MoE layer `layer`."""
        s = self.slots_per_rank
        return self.slot_expert_LP[layer, rank * s : (rank + 1) * s]

    def replicas(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """`(slots_EM, count_E)`: the slots of each expert in order, gone through again where others
        have more, and how many.

        Raises:
            ValueError: an expert has no slot.
        """
        held_P = self.slot_expert_LP[layer]
        by_expert = np.argsort(held_P, kind="stable")[np.count_nonzero(held_P < 0) :]
        count_E = np.bincount(held_P[by_expert], minlength=self.num_experts)
        if not count_E.all():
            raise ValueError(f"layer {layer}: expert {int(count_E.argmin())} has no slot")
        first_E = np.cumsum(count_E) - count_E
        turn_EM = np.arange(count_E.max()) % count_E[:, None]
        slots_EM = by_expert[first_E[:, None] + turn_EM]
        return slots_EM, count_E


@dataclass(frozen=True)
class Move:
    """One expert's weights from one physical slot of MoE layer `layer` to another."""

    layer: int
    expert: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Routing:
    """What the router chose. `slots_TK` (int64): physical slots, -1 where nothing is chosen;
    `weights_TK` (float32): applied once, by combine."""

    slots_TK: "Tensor"
    weights_TK: "Tensor"
