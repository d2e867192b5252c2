"""One rank of the quota tests; arguments: RANK SIZE DEVICE FD RENDEZVOUS CASE.

Every rank draws all ranks' choices and all placements from the case's seed, exchanges counts,
chooses copies on its device, and sends its tokens there. The choice is compared with the host's, to
the token, and what arrives with numpy's plan; a difference ends the process with a traceback.
"""

import faulthandler
import json
import sys
from dataclasses import replace

import numpy as np
import torch

from crossdock.balance.reroute import fill_quotas, reroute_quotas
from crossdock.comm import Board, build_counts, build_transport, build_world
from crossdock.comm.nvlink import NvlinkCounts, nvlink_counts_bytes
from crossdock.comm.shared import ShmLayout
from crossdock.comm.symmetric import allocate_host
from crossdock.comm.waiting import Waiter
from crossdock.core import MoESpec, Placement, RankLost, Routing
from crossdock.layers import choose_products
from crossdock.metrics import Recorder
from crossdock.moe import MoEContext, MoEWeights, Router, RouterOptions
from crossdock.moe.quota import QuotaMap

HIDDEN = 128
CPU = torch.device("cpu")


class Rank:
    def __init__(self, case, rank, size, device, fd, rendezvous):
        kind = "nvlink" if device == "cuda" else "collective"
        world = build_world(rank, size, device, kind, {"shm": fd}, rendezvous, 60.0)
        world.board.beat()
        if "deadline" in case:
            world = replace(world, waiter=Waiter(world.board, case["deadline"]))
        self.case, self.rank, self.size, self.device = case, rank, size, world.device
        self.experts, self.slots = case["experts"], case["slots"]
        self.rng = np.random.default_rng(case["seed"])
        self.transport = build_transport(
            "nvlink", world, max_tokens=case["max_tokens"], hidden=HIDDEN, top_k=case["top_k"],
            slots_per_rank=self.slots, dtype=torch.float32, per_expert=False, recorder=Recorder(),
        )  # fmt: skip
        self.counts = self.build_counts(world)

    def build_counts(self, world):
        if self.device.type == "cuda":
            return build_counts(world, self.experts, Recorder(), self.transport)
        start = ShmLayout(self.size).nbytes + self.size * self.transport.nbytes
        buffer = allocate_host(
            world.memory, start, nvlink_counts_bytes(self.size, self.experts), self.rank, self.size,
            lambda: world.lockstep.exchange([0]),
        )  # fmt: skip
        return NvlinkCounts(self.transport.exchange, self.experts, buffer)

    def placement(self, epoch):
        """With copies, some of them on one rank, and with empty slots."""
        free = self.rng.integers(-1, self.experts, self.size * self.slots - self.experts)
        row_P = self.rng.permutation(np.concatenate([np.arange(self.experts), free]))
        return Placement(epoch, row_P[None], self.experts, self.size)

    def choices(self, tokens_R):
        """Ids of every rank, max_tokens rows of which the last are empty."""
        most, top_k = self.case["max_tokens"], self.case["top_k"]
        popularity_E = self.rng.dirichlet(np.full(self.experts, 0.3))
        ids_RTK = np.full((self.size, most, top_k), -1)
        for ids_TK, tokens in zip(ids_RTK, tokens_R, strict=True):
            ids_TK[:tokens] = self.rng.choice(self.experts, (tokens, top_k), p=popularity_E)
        return ids_RTK

    def draw_tokens(self):
        most = self.case["max_tokens"]
        tokens_R = self.rng.integers(0, most + 1, self.size)
        return np.where(self.rng.random(self.size) < 0.25, 0, tokens_R)

    def check(self, placement, ids_RTK, slots_TK):
        """Chosen as on the host; what every rank sends, as numpy plans it. Returns the rows that
        this rank's slots get."""
        counts_RE = self.counts_of(ids_RTK)
        twin = QuotaMap(placement, 0, self.rank, CPU)
        want_TK = twin(torch.tensor(ids_RTK[self.rank]), lambda own_E: torch.tensor(counts_RE))
        assert torch.equal(slots_TK.cpu(), want_TK)
        row_P = placement.slot_expert_LP[0]
        quota_P = fill_quotas(counts_RE.sum(axis=0), row_P, self.size)
        sent_RP = reroute_quotas(counts_RE, row_P, quota_P)
        mine = slots_TK[slots_TK >= 0].cpu().numpy()
        assert np.bincount(mine, minlength=len(row_P)).tolist() == sent_RP[self.rank].tolist()
        return sent_RP.sum(axis=0)[self.rank * self.slots : (self.rank + 1) * self.slots]

    def counts_of(self, ids_RTK):
        return np.array(
            [np.bincount(ids[ids >= 0].ravel(), minlength=self.experts) for ids in ids_RTK]
        )

    def send(self, slots_TK):
        """Through dispatch and home again; how many rows each of this rank's slots got."""
        x = torch.ones(slots_TK.shape[0], HIDDEN, device=self.device)
        routing = Routing(slots_TK, torch.ones(slots_TK.shape, device=self.device))
        received, ticket = self.transport.dispatch(x, routing)
        self.transport.combine(torch.zeros_like(received.x_NH), ticket)
        here = received.slots_NK.clamp(min=-1).flatten() + 1
        return torch.zeros(self.slots + 1, dtype=torch.int64, device=self.device).scatter_add_(
            0, here, torch.ones_like(here)
        )[1:]

    def steps(self):
        """Eager ones, each with a placement of its own; ranks without tokens only exchange."""
        quota_map = QuotaMap(self.placement(0), 0, self.rank, self.device, on_device=True)
        for n in range(self.case["steps"]):
            placement = self.placement(n + 1)
            quota_map.update(placement)
            tokens_R = self.draw_tokens()
            ids_RTK = self.choices(tokens_R)
            ids_TK = torch.tensor(ids_RTK[self.rank], device=self.device)
            if tokens_R[self.rank]:
                slots_TK = quota_map(ids_TK, self.counts.gather)
            else:
                none_E = torch.zeros(self.experts, dtype=torch.int32, device=self.device)
                tokens_RE = self.counts.gather(none_E)
                assert tokens_RE.tolist() == self.counts_of(ids_RTK).tolist()
                slots_TK = torch.full_like(ids_TK, -1)
            rows_S = self.check(placement, ids_RTK, slots_TK)
            assert self.send(slots_TK).tolist() == rows_S.tolist()
        self.transport.check()

    def graph(self):
        """Captured once; replayed with other tokens and, without a new capture, placements."""
        quota_map = QuotaMap(self.placement(0), 0, self.rank, self.device, on_device=True)
        ids_TK = torch.tensor(self.choices(self.draw_tokens())[self.rank], device=self.device)

        def step():
            slots_TK = quota_map(ids_TK, self.counts.gather)
            return slots_TK, self.send(slots_TK)

        step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [step(), step()]  # both sets of the buffers
        for n in range(self.case["steps"]):
            placement = self.placement(n + 1)
            torch.cuda.synchronize()
            quota_map.update(placement)
            ids_RTK = self.choices(self.draw_tokens())
            ids_TK.copy_(torch.tensor(ids_RTK[self.rank]))
            graph.replay()
            for slots_TK, got_S in outputs:
                assert got_S.tolist() == self.check(placement, ids_RTK, slots_TK).tolist()
        self.transport.check()

    def router(self):
        """A whole router in a graph whose last rows are empty."""
        E, T, K = self.experts, self.case["max_tokens"], self.case["top_k"]
        placement, dtype = self.placement(0), torch.float32
        context = MoEContext(
            self.rank, placement, self.transport, Recorder(on_device=True),
            choose_products(False).matmul, False, self.device, dtype, Board(0, 1),
            router=RouterOptions(counts=self.counts),
        )  # fmt: skip
        weight = torch.tensor(self.rng.standard_normal((E, HIDDEN)), dtype=dtype).to(self.device)
        nothing = torch.empty(0, device=self.device)
        router = Router(MoESpec(E, K, 8), 0, MoEWeights(weight, None, nothing, nothing), context)
        x_TH = torch.zeros(T, HIDDEN, device=self.device)
        keys_T = torch.zeros(T, dtype=torch.int64, device=self.device)
        rows_1 = torch.ones(1, dtype=torch.int32, device=self.device)
        router(x_TH, keys_T, rows_1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routing = router(x_TH, keys_T, rows_1)
        for n in range(self.case["steps"]):
            placement = self.placement(n + 1)
            torch.cuda.synchronize()
            router.place(placement)
            # Not the same for all experts, so that some are chosen often.
            x_RTH = self.rng.standard_normal((self.size, T, HIDDEN)) + self.rng.standard_normal(
                HIDDEN
            )
            tokens_R = self.draw_tokens()
            chosen = torch.tensor(x_RTH, dtype=dtype, device=self.device)
            ids_RTK = np.full((self.size, T, K), -1)
            for r, tokens in enumerate(tokens_R):  # by the same kernel, for the same choice
                ids, _ = router._in_one_kernel(router._logits(chosen[r]), keys_T, None)
                ids_RTK[r, :tokens] = ids[:tokens].cpu().numpy()
            x_TH.copy_(chosen[self.rank])
            rows_1.fill_(int(tokens_R[self.rank]))
            before_E = router.tokens_E.clone()
            graph.replay()
            self.check(placement, ids_RTK, routing.slots_TK)
            assert not routing.weights_TK[tokens_R[self.rank] :].any()
            counted = (router.tokens_E - before_E).tolist()
            assert counted == self.counts_of(ids_RTK)[self.rank].tolist()
            assert self.counts_of(ids_RTK)[self.rank].sum() == tokens_R[self.rank] * K

    def stalled(self):
        """The first rank never comes; the others must say so. The first: each names the lowest rank
        that it misses, and the others may be late too."""
        if self.rank == 0:
            return
        counts_E = torch.ones(self.experts, dtype=torch.int32, device=self.device)
        try:
            self.counts.gather(counts_E)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.transport.check()
        except RankLost as error:
            assert error.rank == 0, error
            assert "did not come to an exchange of counts in time" in str(error), error
        else:
            raise AssertionError("nobody was missed")
        try:
            self.counts.gather(counts_E)
        except RankLost:
            return
        raise AssertionError("it goes on without a rank")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(250, exit=True)
    torch.set_num_threads(1)
    number, of, place, descriptor, store, text = sys.argv[1:]
    job = json.loads(text)
    member = Rank(job, int(number), int(of), place, int(descriptor), store)
    for do in job["do"]:
        getattr(member, do)()
