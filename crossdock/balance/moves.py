"""From one placement to another: which slots keep their expert, which copies have to move."""

from dataclasses import replace

import numpy as np

from crossdock.balance.base import Answer
from crossdock.core import Move


def settle(answer: Answer, current_LP: np.ndarray, num_ranks: int) -> Answer:
    """The same answer with the slots of each rank in another order: an expert that stays on its
    rank keeps its slot. No rank's load changes."""
    slots = current_LP.shape[1] // num_ranks
    new_LP = answer.slot_expert_LP
    at_LP = np.tile(np.arange(new_LP.shape[1]), (len(new_LP), 1))
    for layer, rank in np.argwhere(
        (new_LP != current_LP).reshape(len(new_LP), num_ranks, slots).any(axis=2)
    ):
        here = slice(rank * slots, (rank + 1) * slots)
        at_LP[layer, here] = rank * slots + _order(new_LP[layer, here], current_LP[layer, here])
    share_LP = answer.share_LP
    return replace(
        answer,
        slot_expert_LP=np.take_along_axis(new_LP, at_LP, axis=1),
        share_LP=None if share_LP is None else np.take_along_axis(share_LP, at_LP, axis=1),
    )


def _order(new_S: np.ndarray, current_S: np.ndarray) -> np.ndarray:
    """Which of the new slots goes to each slot."""
    waiting: dict[int, list[int]] = {}
    for slot, expert in enumerate(new_S.tolist()):
        waiting.setdefault(expert, []).append(slot)
    order = [-1] * len(new_S)
    for slot, expert in enumerate(current_S.tolist()):
        if waiting.get(expert):
            order[slot] = waiting[expert].pop(0)
    rest = iter(sorted(slot for slots in waiting.values() for slot in slots))
    return np.array([next(rest) if slot < 0 else slot for slot in order])


def diff(current_LP: np.ndarray, new_LP: np.ndarray, num_ranks: int = 1) -> tuple[Move, ...]:
    """The copies to make, by layer and target slot; a slot that becomes empty needs none.

    The source is a slot of the target's own rank where one holds the expert, else the expert's
    slots take turns. With one rank there is no preference.

    Raises:
        ValueError: shapes that differ, or an expert that has no slot to be copied from.
    """
    if current_LP.shape != new_LP.shape:
        raise ValueError(f"placements differ in shape: {current_LP.shape} and {new_LP.shape}")
    slots = current_LP.shape[1] // num_ranks
    moves = []
    for layer in range(len(new_LP)):
        turns: dict[int, int] = {}
        for target in np.flatnonzero((new_LP[layer] != current_LP[layer]) & (new_LP[layer] >= 0)):
            expert = int(new_LP[layer, target])
            sources = np.flatnonzero(current_LP[layer] == expert)
            if not sources.size:
                raise ValueError(f"layer {layer}: no slot holds expert {expert} now")
            own = sources[sources // slots == target // slots] if num_ranks > 1 else sources[:0]
            if own.size:
                source = own[0]
            else:
                turn = turns.get(expert, 0)
                turns[expert] = turn + 1
                source = sources[turn % len(sources)]
            moves.append(Move(layer, expert, int(source), int(target)))
    return tuple(moves)


def moved_experts(current_LP: np.ndarray, new_LP: np.ndarray, num_ranks: int) -> np.ndarray:
    """`moved_L`: the experts that reach a rank which does not hold them now; what is on a rank
    already costs no transfer."""
    return (_on_ranks(new_LP, num_ranks) & ~_on_ranks(current_LP, num_ranks)).sum(axis=(1, 2))


def _on_ranks(slot_expert_LP: np.ndarray, num_ranks: int) -> np.ndarray:
    """bool [L, R, E]."""
    num_layers, slots = slot_expert_LP.shape
    on_LRE = np.zeros((num_layers, num_ranks, int(slot_expert_LP.max()) + 1), dtype=bool)
    layer_LP = np.broadcast_to(np.arange(num_layers)[:, None], slot_expert_LP.shape)
    rank_LP = np.broadcast_to(np.arange(slots) * num_ranks // slots, slot_expert_LP.shape)
    there = slot_expert_LP >= 0
    on_LRE[layer_LP[there], rank_LP[there], slot_expert_LP[there]] = True
    return on_LRE
