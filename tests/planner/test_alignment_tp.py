import math
import random

import pytest

from crossdock.planner.alignment import (
    advise_dense,
    aligned_tp_sizes,
    dense_memory,
    dense_tp_optimum,
    shards,
)
from crossdock.planner.describe import load_model

FP8 = "float8_e4m3fn"
V3 = load_model("deepseek-v3")


def named(tp, dtype="bfloat16", spec=V3, **more):
    return {shard.name: shard for shard in shards(spec, tp, dtype, **more)}


def test_the_dense_width_over_32_ranks():
    dense = named(32)["dense width"]
    assert (dense.full, dense.size, dense.padded) == (18_432, 576, 640)
    assert dense.wasted == pytest.approx(0.10) and not dense.aligned
    assert "10.0% wasted" in dense.line()
    assert dense.runnable  # BF16 pads
    fp8 = named(32, FP8)["dense width"]
    assert not fp8.runnable and "not runnable: a shard of 576 cuts an FP8 block" in fp8.line()


def test_24_ranks_waste_nothing_but_do_not_divide_the_heads():
    found = named(24, FP8)
    dense, heads = found["dense width"], found["attention heads"]
    assert (dense.size, dense.wasted, dense.satisfied) == (768, 0, True)
    assert not heads.runnable and "24 does not divide 128 heads" in heads.line()


def test_sizes_that_satisfy_both():
    both = [
        tp
        for tp in range(1, 65)
        if named(tp)["dense width"].satisfied and named(tp)["attention heads"].satisfied
    ]
    assert both == [1, 2, 4, 8, 16]
    assert aligned_tp_sizes(V3) == aligned_tp_sizes(V3, FP8) == [1, 2, 4, 8, 16]


def test_padding_is_what_padding_would_be():
    rng = random.Random()
    for _ in range(200):
        tp = rng.randrange(2, 65)
        for shard in shards(V3, tp):
            assert shard.size == math.ceil(shard.full / tp)
            if shard.kind == "heads":
                continue
            assert shard.padded % 128 == 0 and 0 <= shard.padded - shard.size < 128
            assert shard.wasted == pytest.approx(1 - shard.full / (tp * shard.padded))


def test_the_vocabulary_is_padded_and_runs():
    vocabulary = named(4)["vocabulary"]
    assert (vocabulary.size, vocabulary.padded) == (32_320, 32_384)
    assert 0 < vocabulary.wasted < 0.003 and vocabulary.satisfied


def test_one_rank_has_what_the_checkpoint_has():
    lite = load_model("deepseek-v2-lite")  # a dense width of 10,944, no multiple of 128
    assert all(shard.satisfied and not shard.wasted for shard in shards(lite, 1, FP8))
    assert aligned_tp_sizes(lite) == [1]
    # Attention alone: 16 heads of 192, and one of them is no multiple of 128.
    assert aligned_tp_sizes(lite, experts="ep") == [1, 2, 4, 8]


def test_kv_heads_are_repeated_or_refused():
    qwen = load_model("qwen3-235b-a22b")  # 64 heads, 4 KV heads
    assert named(8, spec=qwen)["KV heads"].replicas == 2
    assert "each held by 2 ranks" in named(8, spec=qwen)["KV heads"].line()
    assert not named(6, spec=qwen)["KV heads"].runnable
    assert aligned_tp_sizes(qwen, experts="ep", most=16) == [1, 2, 4, 8, 16]
    assert aligned_tp_sizes(qwen, FP8, most=16) == [1, 2, 4]  # 1536 / 8 = 192


def test_the_published_optimum():
    # LMSYS: at most 3 in prefill beyond 2,048 tokens per GPU, 6 in decode at 128.
    assert 3 < dense_tp_optimum(V3, 2048, graphs=0) < 3.3
    assert dense_tp_optimum(V3, 4096, graphs=0) < 3
    assert 6 < dense_tp_optimum(V3, 128, graphs=3) < 6.5
    for tokens, graphs in ((2048, 0), (128, 3), (777, 1)):
        at = dense_tp_optimum(V3, tokens, graphs)
        least = dense_memory(V3, at, tokens, graphs)
        assert least <= min(dense_memory(V3, at * f, tokens, graphs) for f in (0.8, 0.99, 1.01, 2))


def test_data_parallel_dense_layers_where_that_is_better():
    busy = advise_dense(V3, 32, 16_384, graphs=0, weights_dtype=FP8)
    assert busy.best == 1 and "data parallel" in "\n".join(busy.lines)
    assert "not runnable" in busy.lines[-1]  # what whole TP would be
    idle = advise_dense(V3, 16, 128, graphs=3)
    assert idle.best == 8  # of 1, 2, 4, 8, 16 the nearest to 6.5 by memory
    with pytest.raises(ValueError, match="no dense layers"):
        advise_dense(load_model("mixtral-8x7b"), 8, 128, graphs=0)


def test_the_lines_say_what_cannot_run():
    lines = [shard.line() for shard in shards(V3, 32, FP8, "tp")]
    assert sum("not runnable" in line for line in lines) == 3  # dense, expert, shared
