"""How well an answer spreads a load."""

import numpy as np

from crossdock.balance.base import Answer


def imbalance(load_LE: np.ndarray, answer: Answer, num_ranks: int) -> np.ndarray:
    """`imbalance_L`: the fullest rank's load over the mean; 1.0 is ideal, and a layer without
    load. The load need not be the one that was planned for."""
    return imbalance_of(rank_load(load_LE, answer, num_ranks))


def imbalance_of(rank_load_LR: np.ndarray) -> np.ndarray:
    """`imbalance_L` from loads of ranks."""
    mean_L = rank_load_LR.mean(axis=1)
    return np.divide(rank_load_LR.max(axis=1), mean_L, out=np.ones(len(mean_L)), where=mean_L > 0)


def rank_load(load_LE: np.ndarray, answer: Answer, num_ranks: int) -> np.ndarray:
    """`load_LR`: what each rank has to do."""
    load_LP = slot_load(load_LE, answer)
    return load_LP.reshape(len(load_LP), num_ranks, -1).sum(axis=2)


def slot_load(load_LE: np.ndarray, answer: Answer) -> np.ndarray:
    """`load_LP`: what each slot has to do; 0 in an empty one."""
    slot_expert_LP = answer.slot_expert_LP
    load_LP = np.take_along_axis(load_LE, np.maximum(slot_expert_LP, 0), axis=1)
    return np.where(slot_expert_LP >= 0, load_LP, 0) * shares(answer, load_LE.shape[1])


def shares(answer: Answer, num_experts: int) -> np.ndarray:
    """`share_LP` of an answer, equal ones written out; 0 in an empty slot."""
    if answer.share_LP is not None:
        return answer.share_LP
    count_LE = copies(answer.slot_expert_LP, num_experts)
    slot_expert_LP = answer.slot_expert_LP
    count_LP = np.take_along_axis(count_LE, np.maximum(slot_expert_LP, 0), axis=1)
    return np.where(slot_expert_LP >= 0, 1.0 / np.maximum(count_LP, 1), 0.0)


def copies(slot_expert_LP: np.ndarray, num_experts: int) -> np.ndarray:
    """`count_LE`: the slots of each expert."""
    num_layers = len(slot_expert_LP)
    at_LP = slot_expert_LP + np.arange(num_layers)[:, None] * num_experts
    count = np.bincount(at_LP[slot_expert_LP >= 0], minlength=num_layers * num_experts)
    return count.reshape(num_layers, num_experts)
