"""One rank process of the comm tests: takes (function, arguments) from its pipe, answers in kind.

Run as `python comm_rank.py RANK DEVICE PIPE_FD SIZE:SHM_FD:RENDEZVOUS:DEADLINE ...`, a world per
group.
"""

import sys
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from crossdock.comm import build_transport, build_world
from crossdock.core import CrossdockError, Routing
from crossdock.metrics import Recorder


class Rank:
    def __init__(self, rank, device, groups):
        self.rank, self.device, self.groups = rank, device, groups
        self.worlds, self.transports = {}, {}
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        while True:
            for world in list(self.worlds.values()):
                world.board.beat()
            time.sleep(0.05)

    def world(self, size):
        """With shared memory, and a process group for the collective transport beside it."""
        if size not in self.worlds:
            fd, rendezvous, deadline = self.groups[size]
            fds = {"shm": fd} if fd >= 0 else {}
            self.worlds[size] = build_world(
                self.rank, size, self.device, "collective", fds, rendezvous, deadline
            )
            self.worlds[size].board.beat()
        return self.worlds[size]

    def build(self, size, kinds, **shape):
        self.recorders = {kind: Recorder() for kind in kinds}
        shape["dtype"] = getattr(torch, shape["dtype"])
        self.shape = shape
        self.transports = {
            kind: build_transport(kind, self.world(size), recorder=self.recorders[kind], **shape)
            for kind in kinds
        }

    def run(self, experts_P, steps, in_flight):
        """Every step on every transport; per transport a list of (out, received, bytes so far).

        `steps`: (x_TH as float32, slots_TK, weights_TK). `in_flight`: steps begun at once.
        """
        results = {}
        for kind, transport in self.transports.items():
            results[kind] = done = []
            for at in range(0, len(steps), in_flight):
                begun = []
                for x, slots, weights in steps[at : at + in_flight]:
                    x, slots, weights = (
                        torch.from_numpy(t).to(self.device) for t in (x, slots, weights)
                    )
                    routing, x = Routing(slots, weights), x.to(self.shape["dtype"])
                    begun.append(transport.dispatch_begin(x, routing))
                ended = [transport.dispatch_end(pending) for pending in begun]
                begun = [
                    transport.combine_begin(self.expert(r, experts_P), ticket)
                    for r, ticket in ended
                ]
                for (received, _), pending in zip(ended, begun, strict=True):
                    out = transport.combine_end(pending)
                    got = (received.x_NH.float(), received.slots_NK, received.weights_NK)
                    done.append(
                        (
                            out.float().cpu().numpy(),
                            [t.cpu().numpy() for t in got],
                            transport.bytes_sent(),
                        )
                    )
        return results

    def combine_without(self, absent, experts_P, step):
        """Dispatch, with the flag of the absent rank forged, then a combine that waits for it."""
        (transport,) = self.transports.values()
        x, slots, weights = (torch.from_numpy(t) for t in step)
        pending = transport.dispatch_begin(x, Routing(slots, weights))
        transport._flags[transport._flag(0, pending.epoch, self.rank) + absent] = (
            pending.epoch << 24
        )
        received, ticket = transport.dispatch_end(pending)
        transport.combine_end(transport.combine_begin(self.expert(received, experts_P), ticket))

    def expert(self, received, experts_P):
        """Expert e maps x to x * (1 + e / 8) - e; NaN wherever the answer must not matter."""
        slots_NK, local = received.slots_NK, self.shape["slots_per_rank"]
        experts = torch.from_numpy(experts_P).to(slots_NK.device)
        e_NK = experts[self.rank * local + slots_NK.clamp(min=0)].float()
        y_NKH = received.x_NH.float().unsqueeze(1) * (1 + e_NK / 8).unsqueeze(-1)
        y_NKH = y_NKH - e_NK.unsqueeze(-1)
        none_NK1 = (slots_NK < 0).unsqueeze(-1)
        if self.shape["per_expert"]:
            return y_NKH.masked_fill(none_NK1, float("nan")).to(self.shape["dtype"])
        y_NH = (y_NKH * received.weights_NK.unsqueeze(-1)).sum(1)
        y_NH = y_NH.masked_fill(none_NK1.all(1), float("nan"))
        return y_NH.to(self.shape["dtype"])

    def many(self, count, seed, experts_P):
        """Steps of random size, each checked at home; the number that went wrong."""
        rng = np.random.default_rng((seed, self.rank))
        wrong, shape = 0, self.shape
        (transport,) = self.transports.values()
        for _ in range(count):
            tokens = int(rng.integers(0, shape["max_tokens"] + 1)) * int(rng.integers(0, 2))
            x = torch.from_numpy(rng.standard_normal((tokens, shape["hidden"]), np.float32))
            slots = rng.integers(-1, len(experts_P), (tokens, shape["top_k"]))
            weights = rng.random((tokens, shape["top_k"]), np.float32)
            routing = Routing(torch.from_numpy(slots), torch.from_numpy(weights))
            received, ticket = transport.dispatch_end(transport.dispatch_begin(x, routing))
            pending = transport.combine_begin(self.expert(received, experts_P), ticket)
            out = transport.combine_end(pending)
            e = experts_P[np.maximum(slots, 0)]
            y = x.numpy()[:, None] * (1 + e / 8)[..., None] - e[..., None]
            expected = (y * np.where(slots < 0, 0, weights)[..., None]).sum(1)
            wrong += not np.allclose(out.numpy(), expected, rtol=1e-4, atol=1e-3)
        return wrong

    def lockstep(self, size, rounds):
        """`rounds` of values that tell rank, round and length; all that came back."""
        step = self.world(size).lockstep
        return [
            step.exchange([self.rank, n, *range(-n % 7)] if n % 5 else []) for n in range(rounds)
        ]

    def enter(self, size, stage, layer, step):
        self.world(size).board.enter(stage, layer, step)

    def waited(self):
        return {kind: r.calls.get("wait", 0) for kind, r in self.recorders.items()}


def main():
    torch.set_num_threads(1)
    groups = {}
    for text in sys.argv[4:]:
        size, fd, rendezvous, deadline = text.split(":")
        groups[int(size)] = (int(fd), rendezvous, float(deadline))
    rank, pipe = Rank(int(sys.argv[1]), sys.argv[2], groups), Connection(int(sys.argv[3]))
    with torch.inference_mode():
        while True:
            try:
                name, args, kwargs = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, getattr(rank, name)(*args, **kwargs)))
            except CrossdockError as error:
                pipe.send((False, (type(error).__name__, str(error), getattr(error, "rank", -1))))


main()
