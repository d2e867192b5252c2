"""Rerouting on the device against `balance.reroute`, to the token."""

import numpy as np
import pytest
import torch

from crossdock.balance.reroute import fill_quotas as fill_numpy
from crossdock.balance.reroute import reroute_quotas
from crossdock.kernels.reroute import Copies, count, fill_quotas, reroute, waves_of


def copies_of(slot_expert_P, experts, ranks, device):
    slot_ER = np.full((experts, ranks), -1, np.int32)
    for slot in reversed(np.flatnonzero(slot_expert_P >= 0)):
        slot_ER[slot_expert_P[slot], slot // (len(slot_expert_P) // ranks)] = slot
    copies = Copies.empty(experts, ranks, device)
    copies.load(slot_ER)
    return copies


def draw(rng, ranks, experts, slots, tokens):
    """A placement with copies, some of them on one rank, and each rank's skewed choices."""
    free = rng.integers(-1, experts, ranks * slots - experts)
    slot_expert_P = rng.permutation(np.concatenate([np.arange(experts), free]))
    popularity = rng.dirichlet(np.full(experts, 0.3))
    ids = [rng.choice(experts, (int(rng.integers(tokens)), 2), p=popularity) for _ in range(ranks)]
    return slot_expert_P, ids


@pytest.mark.parametrize(
    ("ranks", "experts", "slots"), [(1, 3, 4), (2, 5, 4), (3, 7, 4), (6, 9, 3)]
)
def test_quotas_and_tokens_are_those_of_numpy(device, ranks, experts, slots):
    rng = np.random.default_rng()
    for _ in range(3):
        slot_expert_P, ids = draw(rng, ranks, experts, slots, 60)
        counts_RE = np.array([np.bincount(i.ravel(), minlength=experts) for i in ids])
        copies = copies_of(slot_expert_P, experts, ranks, device)
        tokens_RE = torch.tensor(counts_RE, device=device)
        quota_ER = fill_quotas(tokens_RE, copies)
        quota_P = np.zeros(ranks * slots, np.int64)
        host_ER = copies.slot_ER.cpu().numpy() >= 0
        quota_P[copies.slot_ER.cpu().numpy()[host_ER]] = quota_ER.cpu().numpy()[host_ER]
        want_P = fill_numpy(counts_RE.sum(axis=0), slot_expert_P, ranks)
        np.testing.assert_array_equal(quota_P, want_P)
        sent_RP = reroute_quotas(counts_RE, slot_expert_P, want_P)
        for rank, chosen in enumerate(ids):
            ids_TK = torch.tensor(chosen, device=device)
            counted = count(ids_TK, experts)
            assert counted.tokens_E.tolist() == counts_RE[rank].tolist()
            slots_TK = reroute(ids_TK, counted, tokens_RE, quota_ER, copies, rank).cpu().numpy()
            np.testing.assert_array_equal(slot_expert_P[slots_TK], chosen)
            got_P = np.bincount(slots_TK.ravel(), minlength=ranks * slots)
            np.testing.assert_array_equal(got_P, sent_RP[rank])


def test_what_chose_nothing_gets_no_slot(device):
    copies = copies_of(np.array([0, 1, 1, 0]), 2, 2, device)
    ids_TK = torch.tensor([[0, -1], [-1, 1], [0, -1]], device=device)
    tokens_RE = torch.tensor([[2, 1], [0, 1]], device=device)
    quota_ER = fill_quotas(tokens_RE, copies)
    counted = count(ids_TK, 2)
    assert counted.tokens_E.tolist() == [2, 1]
    slots_TK = reroute(ids_TK, counted, tokens_RE, quota_ER, copies, 0)
    assert quota_ER.tolist() == [[1, 1], [1, 1]]
    assert slots_TK.tolist() == [[0, -1], [-1, 1], [3, -1]]


def test_experts_of_a_wave_share_no_rank_and_keep_their_order():
    rng = np.random.default_rng()
    host_ER = rng.random((90, 12)) < 0.15
    host_ER[:40] = rng.random((40, 1)) < 0.5  # alone or, all of them, everywhere
    host_ER[:, 3] = True
    host_ER[40:] &= rng.random((50, 12)) < 0.6
    host_ER[50:, rng.integers(12)] = True
    waves_EL, num = waves_of(host_ER)
    assert (waves_EL[num:] < 0).all()
    wave_E = {int(e): at for at, row in enumerate(waves_EL[:num]) for e in row if e >= 0}
    spread = np.flatnonzero(host_ER.sum(axis=1) > 1)
    assert sorted(wave_E) == spread.tolist()
    for i, first in enumerate(spread.tolist()):
        for second in spread[i + 1 :].tolist():
            if (host_ER[first] & host_ER[second]).any():
                assert wave_E[first] < wave_E[second]
