"""One rank of the nvlink tests; arguments: RANK SIZE DEVICE FD RENDEZVOUS DEADLINE CASES.

Every rank draws all ranks' steps from the case's seed, runs its own on the nvlink transport and on
the collective one, and compares bit by bit; a difference ends the process with a traceback.
"""

import faulthandler
import json
import sys
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from crossdock.comm import build_transport, build_world
from crossdock.comm.nvlink import NvlinkLayout, build_nvlink
from crossdock.comm.paths import PathBytes
from crossdock.comm.waiting import Waiter
from crossdock.core import RankLost, Routing, Rows
from crossdock.kernels.combine import reduce_rows_torch
from crossdock.kernels.dispatch import staging_torch
from crossdock.kernels.rounding import quantise_blocks_torch
from crossdock.kernels.segments import place_rows_torch
from crossdock.kernels.signals import COUNT_BITS
from crossdock.metrics import Recorder

NAN = float("nan")


def make_step(rng, case, tokens):
    """(x, slots, weights); experts are physical slots here."""
    total, top_k = case["size"] * case["slots"], case["top_k"]
    usable = np.arange(case["slots"]) if case["pattern"] == "one rank" else np.arange(total)
    if case["do"] == "masked":  # a slot has room for each token once
        slots = usable[rng.random((tokens, len(usable))).argsort(1)[:, :top_k]]
    else:
        slots = rng.choice(usable, (tokens, top_k))
    if case["pattern"] == "holes":
        slots[rng.random(slots.shape) < 0.4] = -1
        slots[rng.random(tokens) < 0.3] = -1
    x = rng.standard_normal((tokens, case["hidden"])).astype(np.float32)
    return x, slots, rng.random((tokens, top_k), np.float32)


class Rank:
    def __init__(self, rank, size, device, fd, rendezvous, deadline):
        fds = {"shm": fd} if fd >= 0 else {}
        world = build_world(rank, size, device, "collective", fds, rendezvous, deadline)
        world.board.beat()
        self.rank, self.device, self.rendezvous = rank, world.device, rendezvous
        self.world, self.built = world, 0

    def transports(self, case):
        dtype = getattr(torch, case["dtype"])
        self.built += 1
        world = self.world
        # Host buffers lie where those of the case before did.
        world.lockstep.exchange([self.built])
        if "deadline" in case:
            world = replace(world, waiter=Waiter(world.board, case["deadline"]))
        if self.device.type == "cuda":
            store = dist.FileStore(f"{self.rendezvous}.symmetric{self.built}", world.size)
            world = replace(world, store=store)
        shape = {
            "max_tokens": case["max_tokens"], "hidden": case["hidden"], "top_k": case["top_k"],
            "slots_per_rank": case["slots"], "dtype": dtype, "per_expert": case["per_expert"],
        }  # fmt: skip
        oracle = build_transport("collective", world, recorder=Recorder(), **shape)
        if not case["fp8"] and world.size > 1:
            nvlink = build_transport("nvlink", world, recorder=Recorder(), **shape)
            self.poison(nvlink.exchange)
            return oracle, nvlink
        layout = NvlinkLayout(
            world.size, case["max_tokens"], case["hidden"], case["top_k"], dtype.itemsize,
            case["fp8"], case["per_expert"],
        )  # fmt: skip
        paths = PathBytes(world.rank, world.topology)
        nvlink = build_nvlink(world, layout, case["slots"], dtype, paths)
        self.poison(nvlink.exchange)
        return oracle, nvlink

    def poison(self, exchange):
        """NaN wherever rows, records and weights go; flags stay as they are."""
        layout = exchange.layout
        for at in range(2):
            start = at * layout.set_bytes
            exchange._buffer.local[start + layout.records : start + layout.set_bytes].fill_(0xFF)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.lockstep.exchange([2])

    def run(self, case):
        oracle, nvlink = self.transports(case)
        rng = np.random.default_rng(case["seed"])
        dtype, size = getattr(torch, case["dtype"]), case["size"]
        for tokens_R in case["tokens"]:
            steps = [make_step(rng, case, tokens_R[r]) for r in range(size)]
            x, slots, weights = (torch.from_numpy(t).to(self.device) for t in steps[self.rank])
            routing, x = Routing(slots, weights), x.to(dtype)
            sent = x
            if case["fp8"]:
                q, scale = quantise_blocks_torch(x)
                blocks = q.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)
                sent = blocks.flatten(-2).to(dtype)
            told, asked = dict(nvlink.bytes_sent()), dict(oracle.bytes_sent())
            want, got = oracle.dispatch_begin(sent, routing), nvlink.dispatch_begin(x, routing)
            (want, ticket), (got, mine) = oracle.dispatch_end(want), nvlink.dispatch_end(got)
            self.same_rows(want, got)
            self.twins(case, steps, mine.arrived, nvlink, mine.sent.at)
            y, wanted = self.experts(case, got), self.experts(case, want)
            out = nvlink.combine_end(nvlink.combine_begin(y, mine))
            expected = oracle.combine_end(oracle.combine_begin(wanted, ticket))
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            plain = self.moved(nvlink, told)
            assert case["fp8"] or plain == self.moved(oracle, asked)
            told = dict(nvlink.bytes_sent())
            self.fused_rows(case, nvlink.exchange, x, routing, want, expected)
            assert self.moved(nvlink, told) == plain
            if not case["fp8"]:
                self.segments(case, nvlink.exchange, oracle, x, routing)

    def moved(self, transport, told):
        return {key: transport.bytes_sent()[key] - told[key] for key in ("node", "self")}

    def segments(self, case, exchange, oracle, x, routing):
        """The experts' rows in the order of aligned segments and reduced on the way, and once more
        rows as they came, both halves in one launch."""
        given = routing.slots_TK, routing.weights_TK
        want, ticket = oracle.dispatch_end(oracle.dispatch_begin(x, routing))
        exchange.dispatch_send(0, x, *given)
        arrived = exchange.dispatch_rows(0)
        segments = exchange.place(0, arrived, 8)
        y = self.segmented(exchange, arrived, segments)
        exchange.combine_segments(0, y, arrived, segments)
        out = exchange.combine_home(0, *given)
        arrived = exchange.dispatch_rows_fused(0, x, *given)
        self.same_rows(want, Rows(arrived.rows, arrived.slots_NK, arrived.weights_NK))
        segments = exchange.place(0, arrived, 8)
        y = self.segmented(exchange, arrived, segments)
        again = exchange.combine_segments_fused(0, y, arrived, segments, *given)
        assert torch.equal(out, again)
        exchange.check()
        wanted = self.outputs(want.x_NH, want.slots_NK)
        if not case["per_expert"]:
            parts = wanted.float() * want.weights_NK.unsqueeze(-1)
            wanted = parts.masked_fill((want.slots_NK < 0).unsqueeze(-1), 0.0).sum(1).to(x.dtype)
        expected = oracle.combine_end(oracle.combine_begin(wanted, ticket))
        # The order of fp32 sums may differ, and with it a last bit of what travels.
        error = 2 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(out, expected, rtol=error, atol=16 * error)

    def segmented(self, exchange, arrived, segments):
        here = arrived.slots_NK >= 0
        rows = arrived.rows
        y = rows.new_full((len(segments.rows), rows.shape[1]), NAN)
        y[segments.places_NK[here].long()] = self.outputs(rows, arrived.slots_NK)[here]
        return y

    def fused_rows(self, case, exchange, x, routing, want, expected):
        """Rows as they came, both halves in one launch."""
        given = routing.slots_TK, routing.weights_TK
        arrived = exchange.dispatch_rows_fused(1, x, *given)
        got = Rows(arrived.rows, arrived.slots_NK, arrived.weights_NK)
        if not case["fp8"]:
            self.same_rows(want, got)
        else:
            blocks = got.x_NH.float().unflatten(-1, (-1, 128)) * arrived.scales.unsqueeze(-1)
            got = Rows(blocks.flatten(-2).to(x.dtype), got.slots_NK, got.weights_NK)
        y = self.experts(case, got).contiguous()
        out = exchange.combine_rows_fused(1, y, arrived, *given)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        exchange.check()

    def outputs(self, x_NH, slots_NK):
        """Of each expert, unweighted and rounded as it would be; NaN where there is none."""
        s_NK = slots_NK.clamp(min=0).float().unsqueeze(-1)
        y_NKH = x_NH.float().unsqueeze(1) * (1 + s_NK / 8) - s_NK
        return y_NKH.masked_fill((slots_NK < 0).unsqueeze(-1), NAN).to(x_NH.dtype)

    def same_rows(self, want, got):
        came = (got.slots_NK >= 0).any(1)
        torch.testing.assert_close(got.x_NH[came], want.x_NH, rtol=0, atol=0)
        assert torch.equal(got.slots_NK[came], want.slots_NK)
        assert torch.equal(got.weights_NK[came], want.weights_NK)
        assert not got.weights_NK[~came].any()

    def twins(self, case, steps, arrived, nvlink, at):
        """What the kernels computed beside rows, against their torch twins."""
        slots, weights = staging_torch(
            [torch.from_numpy(s) for _, s, _ in steps], [torch.from_numpy(w) for *_, w in steps],
            self.rank, case["slots"], case["max_tokens"],
        )  # fmt: skip
        assert torch.equal(arrived.slots_NK.cpu(), slots)
        assert torch.equal(arrived.weights_NK.cpu(), weights)
        counts, offsets, rows, places = place_rows_torch(slots, case["slots"], 8)
        segments = nvlink.exchange.place(at, arrived, 8)
        assert torch.equal(arrived.counts_S.cpu().long(), counts)
        assert torch.equal(segments.offsets.cpu().long(), offsets)
        end = int(offsets[-1])
        got = segments.rows.cpu().long()[:end]
        for s in range(case["slots"]):
            piece = slice(int(offsets[s]), int(offsets[s + 1]))
            assert torch.equal(got[piece].sort()[0], rows[piece].sort()[0])
        here = places >= 0
        mine = segments.places_NK.cpu().long()
        assert torch.equal(mine >= 0, here)
        row = torch.arange(len(slots))[:, None].expand_as(slots)
        assert torch.equal(got[mine[here]], row[here])

    def experts(self, case, received):
        """Slot s maps x to x * (1 + s / 8) - s; NaN wherever the answer must not matter."""
        slots = received.slots_NK
        s_NK = slots.clamp(min=0).float()
        y_NKH = received.x_NH.float().unsqueeze(1) * (1 + s_NK / 8).unsqueeze(-1)
        y_NKH = (y_NKH - s_NK.unsqueeze(-1)).masked_fill((slots < 0).unsqueeze(-1), NAN)
        if case["per_expert"]:
            return y_NKH.to(getattr(torch, case["dtype"]))
        y_NH = torch.zeros_like(y_NKH[:, 0])
        for k in range(slots.shape[1]):
            part = y_NKH[:, k] * received.weights_NK[:, k, None]
            y_NH = y_NH + part.masked_fill((slots[:, k] < 0).unsqueeze(-1), 0.0)
        return y_NH.masked_fill((slots < 0).all(1, keepdim=True), NAN).to(
            getattr(torch, case["dtype"])
        )

    def masked(self, case):
        """Low latency to the masked layout and back, two batches in flight, twice."""
        oracle, nvlink = self.transports(case)
        exchange, rng = nvlink.exchange, np.random.default_rng(case["seed"])
        dtype, size, hidden = getattr(torch, case["dtype"]), case["size"], case["hidden"]
        S, C = case["slots"], size * case["max_tokens"]
        for n, tokens_two in enumerate(case["tokens"]):
            batches, fused = [], n % 2 == 1
            for at, tokens_R in enumerate(tokens_two):
                steps = [make_step(rng, case, tokens_R[r]) for r in range(size)]
                x, slots, weights = (torch.from_numpy(t).to(self.device) for t in steps[self.rank])
                batches.append((at, x.to(dtype), slots, weights))
                if not fused:
                    exchange.dispatch_send(at, *batches[-1][1:])
            for at, x, slots, weights in batches:
                want, ticket = oracle.dispatch_end(
                    oracle.dispatch_begin(x, Routing(slots, weights))
                )
                q, scales = x.new_full((S, C, hidden), NAN), None
                if case["fp8"]:
                    q = q.to(torch.float8_e4m3fn)
                    scales = torch.full((S, C, hidden // 128), NAN, device=self.device)
                if fused:
                    masked = exchange.dispatch_masked_fused(at, x, slots, weights, q, scales)
                else:
                    masked = exchange.dispatch_masked(at, q, scales)
                y, expected = self.check_masked(case, want, masked)
                if fused:
                    out = exchange.combine_masked_fused(at, y, masked, slots, weights)
                else:
                    exchange.combine_masked(at, y, masked)
                    out = exchange.combine_home(at, slots, weights)
                exchange.check()
                home = oracle.combine_end(oracle.combine_begin(expected, ticket))
                torch.testing.assert_close(
                    out, home, rtol=case["tolerance"], atol=case["tolerance"]
                )

    def check_masked(self, case, want, masked):
        S = case["slots"]
        want_x = want.x_NH
        if case["fp8"]:
            q, scale = quantise_blocks_torch(want_x)
            want_x = (q.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2)
        counts = torch.bincount(want.slots_NK[want.slots_NK >= 0], minlength=S)
        assert torch.equal(masked.counts_S.long(), counts)
        got = masked.x.float()
        if masked.scales is not None:
            got = (got.unflatten(-1, (-1, 128)) * masked.scales.unsqueeze(-1)).flatten(-2)
        for s in range(S):
            times = (want.slots_NK == s).sum(1)
            rows = want_x.float().repeat_interleave(times, 0)
            mine = got[s, : counts[s]]
            order = torch.linspace(1, 2, 64, dtype=torch.float64, device=self.device).exp()
            keys = [(x[:, :64].double() * order).sum(1).argsort() for x in (mine, rows)]
            assert torch.equal(mine[keys[0]], rows[keys[1]])
        dtype = getattr(torch, case["dtype"])
        s_S = torch.arange(S, device=self.device).float()[:, None, None]
        y = (got * (1 + s_S / 8) - s_S).to(dtype)
        s_NK = want.slots_NK.clamp(min=0)
        y_NKH = want_x.float().unsqueeze(1) * (1 + s_NK.float() / 8).unsqueeze(-1)
        y_NKH = (y_NKH - s_NK.float().unsqueeze(-1)).to(dtype)
        if case["per_expert"]:
            return y, y_NKH
        N, K = want.slots_NK.shape
        index = torch.arange(N * K, device=self.device).view(N, K)
        index = index.masked_fill(want.slots_NK < 0, -1)
        return y, reduce_rows_torch(y_NKH.flatten(0, 1), index, want.weights_NK)

    def send(self, exchange, fused, at, given):
        if not fused:
            exchange.dispatch_send(at, *given)

    def trip(self, exchange, fused, at, given, room):
        """From what was sent, through experts that change nothing, home."""
        if fused:
            masked = exchange.dispatch_masked_fused(at, *given, room, None)
            return exchange.combine_masked_fused(at, masked.x, masked, *given[1:])
        masked = exchange.dispatch_masked(at, room, None)
        exchange.combine_masked(at, masked.x, masked)
        return exchange.combine_home(at, *given[1:])

    def soak(self, case):
        """Round trips of random size, two in flight, now and then each half of one in one launch.
        Rows and weights are such that every sum is exact."""
        _, nvlink = self.transports(case)
        exchange, hidden, most = nvlink.exchange, case["hidden"], case["max_tokens"]
        S, total = case["slots"], case["size"] * case["slots"]
        rng = np.random.default_rng((case["seed"], self.rank))
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        room = [
            torch.empty(S, most * case["size"], hidden, dtype=torch.bfloat16, device=self.device)
            for _ in range(2)
        ]
        for n in range(case["rounds"]):
            batches, fused = [], n % 3 == 0
            for at in range(2):
                tokens = int(rng.integers(0, most + 1)) * int(rng.integers(0, 4) > 0)
                x = torch.randint(-8, 9, (tokens, hidden), device=self.device).bfloat16()
                order = torch.rand(tokens, total, device=self.device).argsort(1)
                slots = order[:, : case["top_k"]].contiguous()
                slots[torch.rand(slots.shape, device=self.device) < 0.2] = -1
                weights = 2.0 ** torch.randint(-1, 2, slots.shape, device=self.device)
                self.send(exchange, fused, at, (x, slots, weights))
                batches.append((at, x, slots, weights))
            for at, x, slots, weights in batches:
                out = self.trip(exchange, fused, at, (x, slots, weights), room[at])
                factor = weights.masked_fill(slots < 0, 0.0).sum(1, keepdim=True)
                wrong += (out.float() != x.float() * factor).any()
            if n % 100 == 99:
                assert not int(wrong), f"wrong in one of the {n} rounds so far"
        assert not int(wrong)
        exchange.check()
        if self.rank == 0:
            print(f"{2 * case['rounds']} round trips, every row exact", flush=True)

    def graph(self, case):
        """A captured round trip, replayed with other rows and slots."""
        _, nvlink = self.transports(case)
        exchange, hidden, tokens = nvlink.exchange, case["hidden"], case["max_tokens"]
        total = case["size"] * case["slots"]
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        slots = torch.arange(case["top_k"], device=self.device).repeat(tokens, 1)
        weights = torch.ones(tokens, case["top_k"], device=self.device)
        room = x.new_empty(case["slots"], tokens * case["size"], hidden)

        def trip():
            out = []
            for at, fused in ((0, False), (1, True), (0, True), (1, False)):
                self.send(exchange, fused, at, (x, slots, weights))
                out.append(self.trip(exchange, fused, at, (x, slots, weights), room))
            return out

        trip()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = trip()
        for _ in range(case["rounds"]):
            x.copy_(torch.randint(-8, 9, x.shape, device=self.device))
            slots.copy_(
                torch.rand(tokens, total, device=self.device).argsort(1)[:, : slots.shape[1]]
            )
            weights.copy_(2.0 ** torch.randint(-1, 2, slots.shape, device=self.device))
            graph.replay()
            expected = x.float() * weights.sum(1, keepdim=True)
            for one in out:
                assert torch.equal(one.float(), expected)
        exchange.check()

    def lagging(self, case):
        """The last rank takes its time and the others have no tokens, yet nobody dispatches again
        before it combines, nor combines again before it dispatches: its memory is in use."""
        _, nvlink = self.transports(case)
        exchange, size, dtype = nvlink.exchange, case["size"], torch.float32
        words = [
            exchange._buffer.view(exchange.layout.counts(phase), (size,), torch.int64)
            for phase in range(2)
        ]
        last = self.rank == size - 1
        x, slots, weights = map(torch.from_numpy, make_step(np.random.default_rng(1), case, 2))
        given = x[: 2 * last], slots[: 2 * last], weights[: 2 * last]
        room = torch.empty(case["slots"], size * case["max_tokens"], case["hidden"], dtype=dtype)
        for epoch in range(1, case["rounds"] + 1):
            if last:
                time.sleep(case["lag"])  # whoever does not wait goes on meanwhile
                assert (words[1] == epoch - 1).all(), words
            masked = exchange.dispatch_masked_fused(0, *given, room, None)
            if last:
                time.sleep(case["lag"])
                assert (words[0] >> COUNT_BITS == epoch).all(), words
            exchange.combine_masked_fused(0, room, masked, *given[1:])
            exchange.check()

    def stalled(self, case):
        """The first rank never comes; the others must say so. The first: each names the lowest rank
        that it misses, and the others may be late too."""
        _, nvlink = self.transports(case)
        if self.rank == 0:
            if case["stage"] == "combine":
                self.world.lockstep.exchange([])
            return
        x, slots, weights = make_step(np.random.default_rng(1), case, 2)
        x, slots, weights = (torch.from_numpy(t).to(self.device) for t in (x, slots, weights))
        try:
            self.wait_for_all(case, nvlink, x, slots, weights)
        except RankLost as error:
            assert error.rank == 0, error
            assert f"did not come to {case['stage']}" in str(error), error
        else:
            raise AssertionError("nobody was missed")
        try:  # dead from then on
            nvlink.exchange.dispatch_send(1, x, slots, weights)
        except RankLost as error:
            assert error.rank == 0, error
        else:
            raise AssertionError("it goes on without a rank")

    def wait_for_all(self, case, nvlink, x, slots, weights):
        exchange = nvlink.exchange
        if case["stage"] == "dispatch" and case["fused"]:
            exchange.dispatch_rows_fused(0, x, slots, weights)
        else:
            exchange.dispatch_send(0, x, slots, weights)
            if case["stage"] == "combine":  # as if the first rank had come to dispatch alone
                self.forge(exchange)
                self.world.lockstep.exchange([])  # the others have sent theirs
            arrived = exchange.dispatch_rows(0)
            y = arrived.rows.clone()
            if case["fused"]:
                exchange.combine_rows_fused(0, y, arrived, slots, weights)
            else:
                exchange.combine_rows(0, y, arrived)
                exchange.combine_home(0, slots, weights, y)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        exchange.check()

    def forge(self, exchange):
        layout = exchange.layout
        counts = exchange._buffer.view(layout.counts(0), (layout.ranks,), torch.int64)
        counts[0] = 1 << 24


def main():
    faulthandler.enable()
    torch.set_num_threads(1)
    rank, size, fd = (int(sys.argv[i]) for i in (1, 2, 4))
    one = Rank(rank, size, sys.argv[3], fd, sys.argv[5], float(sys.argv[6]))
    with torch.inference_mode():
        for case in json.loads(sys.argv[7]):
            getattr(one, case["do"])(case)


main()
