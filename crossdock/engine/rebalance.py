"""Moving to another placement while steps go on: this rank's part of it.

One layer after another. Its copies travel into the staging of the ranks that will hold them, a
bounded number of bytes a step; when every rank has sent its own and found those it got intact, all
switch that layer at the same step: copies go from staging to their slots, and the map of slots
changes. Until then nothing that a step reads has been touched, so a failure leaves the layer as it
was, and all ranks stop there together.

What ranks know of each other is four numbers a step, (epoch, sent, ready, free), from the lockstep.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, uint8

from crossdock.balance import diff
from crossdock.comm import SlotCopies
from crossdock.core import ConfigError, Move, Placement, SlotLayer

_FAILED = -1


@dataclass(frozen=True)
class Ended:
    """`layers`: how many have the new placement; `error`: why not all of those that differ."""

    epoch: int
    layers: int
    moved_bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class _Copy:
    """`place`: of the staging of rank `to`; `slot`: where it lies now, on this rank."""

    to: int
    place: int
    slot: int


@dataclass(frozen=True)
class _Task:
    """A layer's copies. `arriving`: (place of the staging, slot), on this rank."""

    layer: int
    outgoing: tuple[_Copy, ...]
    arriving: tuple[tuple[int, int], ...]


class Rebalancer:
    """`bytes_per_step`: how much this rank sends in a step at most."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        layers: Sequence[SlotLayer],
        copies: SlotCopies,
        bytes_per_step: int,
    ):
        self.rank, self.placement, self.copies = rank, placement, copies
        self._layers, self._budget = layers, bytes_per_step
        self._target: Placement | None = None
        self._tasks: list[_Task] = []
        self._done = self._sent = self._ready = self._free = 0
        self._copy = self._offset = self._moved = 0
        self._examining = False
        self._started = 0.0

    @property
    def busy(self) -> bool:
        return self._target is not None

    def begin(self, epoch: int, slot_expert_LP: np.ndarray) -> None:
        """
        Raises:
            ConfigError: another move is under way, or a placement that this engine cannot have.
        """
        if self._target is not None:
            raise ConfigError(f"placement {self._target.epoch} is still being moved to")
        now = self.placement
        if slot_expert_LP.shape != now.slot_expert_LP.shape:
            raise ConfigError(
                f"a placement of shape {slot_expert_LP.shape}; expected (layers, slots) = "
                f"{now.slot_expert_LP.shape}"
            )
        target = replace(now, epoch=epoch, slot_expert_LP=slot_expert_LP)
        tasks = self._plan(target)
        self._target, self._tasks, self._started = target, tasks, time.perf_counter()
        self._done = self._sent = self._ready = self._moved = 0
        # What the move before left in the staging may still be on its way into its slots.
        self._free = 0 if self.copies.free() else -1
        self._begin_layer()

    def _plan(self, target: Placement) -> list[_Task]:
        now, S = self.placement, target.slots_per_rank
        by_layer: dict[int, list[Move]] = {}
        tasks = []
        differ = (now.slot_expert_LP != target.slot_expert_LP).any(axis=1)
        layers = np.flatnonzero(differ).tolist()
        try:
            for move in diff(now.slot_expert_LP, target.slot_expert_LP, now.num_ranks):
                by_layer.setdefault(move.layer, []).append(move)
            for layer in layers:
                target.replicas(layer)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for layer in layers:
            places: dict[int, int] = {}  # taken in the staging of each rank
            outgoing, arriving = [], []
            for move in by_layer.get(layer, ()):
                to, place = move.target // S, places.setdefault(move.target // S, 0)
                places[to] += 1
                if move.source // S == self.rank:
                    outgoing.append(_Copy(to, place, move.source % S))
                if to == self.rank:
                    arriving.append((place, move.target % S))
            if max(places.values(), default=0) > self.copies.places:
                raise ConfigError(
                    f"layer {layer} brings {max(places.values())} experts to one rank, the staging "
                    f"holds {self.copies.places}"
                )
            tasks.append(_Task(layer, tuple(outgoing), tuple(arriving)))
        return tasks

    def words(self) -> tuple[int, int, int, int]:
        """For the lockstep. The last three count layers: all of whose copies this rank has sent,
        found intact, and no longer needs in its staging; a negative `ready` says that one was not.
        """
        epoch = self.placement.epoch if self._target is None else self._target.epoch
        if self._free < self._done and self.copies.free():
            self._free = self._done
        return epoch, self._sent, self._ready, self._free

    def advance(self, rows: Sequence[tuple[int, ...]]) -> Ended | None:
        """After every exchange, with the words of all ranks; the same on all of them."""
        if self._target is None:
            return None
        if any(row[0] != self._target.epoch for row in rows):
            return None  # not everybody has heard of it yet
        if any(row[2] == _FAILED for row in rows):
            ranks = [rank for rank, row in enumerate(rows) if row[2] == _FAILED]
            layer = self._tasks[self._done].layer
            return self._end(f"layer {layer}: a copy arrived damaged on rank {ranks[0]}")
        if min(row[2] for row in rows) > self._done:
            self._switch(self._tasks[self._done])
        if self._done == len(self._tasks):
            return self._end(None)
        if self._ready == self._done < min(row[1] for row in rows):
            if not self._examining:
                self.copies.examine([place for place, _ in self._tasks[self._done].arriving])
                self._examining = True
            intact = self.copies.intact()
            if intact is not None:
                self._ready = self._done + 1 if intact else _FAILED
        elif self._sent == self._done <= min(row[3] for row in rows):
            self._send(self._tasks[self._done])
        return None

    def _send(self, task: _Task) -> None:
        left = self._budget
        while left > 0 and self._copy < len(task.outgoing):
            copy = task.outgoing[self._copy]
            for data, start in self._pieces(task.layer, copy.slot):
                part = data[max(0, self._offset - start) :][:left]
                if self._offset < start + data.numel() and part.numel():
                    self.copies.push(copy.to, copy.place, self._offset, part)
                    self._offset += part.numel()
                    left -= part.numel()
                    self._moved += part.numel()
            if self._offset < self.copies.nbytes:
                return
            self.copies.seal(
                copy.to, copy.place, [d for d, _ in self._pieces(task.layer, copy.slot)]
            )
            self._copy, self._offset = self._copy + 1, 0
        if self._copy == len(task.outgoing) and self.copies.sent():
            self._sent = self._done + 1

    def _pieces(self, layer: int, slot: int) -> list[tuple[Tensor, int]]:
        """A slot's bytes, tensor by tensor, and where each begins in a copy."""
        pieces, start = [], 0
        for tensor in self._layers[layer].slot_tensors():
            data = tensor[slot].view(-1).view(uint8)
            pieces.append((data, start))
            start += data.numel()
        return pieces

    def _switch(self, task: _Task) -> None:
        assert self._target is not None
        for place, slot in task.arriving:
            data = self.copies.arrived(place)
            for piece, start in self._pieces(task.layer, slot):
                piece.copy_(data[start : start + piece.numel()])
        self.copies.used()
        slots_LP = self.placement.slot_expert_LP.copy()
        slots_LP[task.layer] = self._target.slot_expert_LP[task.layer]
        self.placement = replace(self.placement, slot_expert_LP=slots_LP)
        self._layers[task.layer].place(self.placement)
        self._done += 1
        self._begin_layer()

    def _begin_layer(self) -> None:
        self._copy = self._offset = 0
        self._examining = False

    def _end(self, error: str | None) -> Ended:
        assert self._target is not None
        epoch, self._target = self._target.epoch, None
        self.placement = replace(self.placement, epoch=epoch)
        seconds = time.perf_counter() - self._started
        return Ended(epoch, self._done, self._moved, seconds, error)
