"""Which models can be split over the ranks of an attention group, and into what."""

from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.core import (
    ConfigError,
    EngineConfig,
    GQASpec,
    MLASpec,
    check_tp,
    load_spec,
    shard_attention,
)
from crossdock.core.config import load_toml
from crossdock.core.tensor_parallel import why_not_tp

MODELS = Path(__file__).parents[2] / "recipes" / "models"


def spec(name: str):
    return load_spec(next(p for p in MODELS.glob("*.json") if p.stem == name))


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda p: p.stem)
def test_published_models(path: Path) -> None:
    """In BF16 all but those with norms over all heads; shares add up to the whole."""
    model = load_spec(path)
    a = model.attention
    for tp in (1, 2, 4):
        against = why_not_tp(model, tp, None)
        full_norm = isinstance(a, GQASpec) and a.qk_norm == "full"
        assert bool(against) == (full_norm and tp > 1), against
        if against:
            continue
        part = shard_attention(a, tp)
        assert part.num_heads * tp == a.num_heads
        if isinstance(a, MLASpec):
            assert part.kv_width == a.kv_width  # the latent cache is whole
        else:
            assert part.kv_width * tp == a.kv_width


def test_what_cannot_be_split_is_refused_with_the_sizes_that_work() -> None:
    v3 = spec("deepseek-v3")
    odd = replace(v3, attention=replace(v3.attention, num_heads=126), intermediate_size=18_434)
    with pytest.raises(ConfigError) as caught:
        check_tp(odd, 4, None)
    assert str(caught.value) == (
        "tp = 4 cannot split this model: 4 does not divide 126 attention heads; 4 does not divide "
        "18434 columns of dense layers; sizes that work: 1, 2"
    )
    few = GQASpec(num_heads=32, num_kv_heads=2, head_dim=128)
    with pytest.raises(ConfigError, match=r"4 does not divide 2 KV heads; sizes that work: 1, 2$"):
        check_tp(replace(v3, attention=few), 4, None)
    full = replace(few, qk_norm="full")
    with pytest.raises(ConfigError, match=r"norms of queries and keys.*sizes that work: 1$"):
        check_tp(replace(v3, attention=full), 2, None)


def test_a_shard_that_cuts_a_block_is_refused_in_fp8_alone() -> None:
    assert why_not_tp(spec("deepseek-v3"), 4, 128) == []
    lite = spec("deepseek-v2-lite")
    assert why_not_tp(lite, 2, None) == []
    with pytest.raises(ConfigError) as caught:
        check_tp(lite, 2, 128)
    assert str(caught.value) == (
        "tp = 2 cannot split this model: a shard of the dense width, 10944 / 2 = 5472, cuts an FP8 "
        "block of 128; sizes that work: 1"
    )


def test_settings(tmp_path: Path) -> None:
    config = EngineConfig("m", ranks=8, tp=4, max_num_batched_tokens=1001)
    assert (config.groups, config.rank_tokens) == (2, 251)
    with pytest.raises(ConfigError, match="6 ranks are no multiple of tp = 4; set ranks to 4, or"):
        EngineConfig("m", ranks=6, tp=4)
    with pytest.raises(ConfigError, match="1 rank is no multiple of tp = 2; set ranks to 2, or"):
        EngineConfig("m", ranks=1, tp=2)
    path = tmp_path / "settings.toml"
    path.write_text("max_num_seqs = 8\ntp = 4\n")  # ranks come from elsewhere
    assert load_toml(path)["tp"] == 4
    path.write_text("max_num_seqs = 8\ntp = 3\n")
    with pytest.raises(ConfigError, match=r"settings\.toml:2: tp: tp must be one of 1, 2, 4"):
        load_toml(path)
