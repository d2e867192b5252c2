"""Models of random weights: shapes from config.json alone, the same on every rank."""

import json

import pytest
import torch

from crossdock import LLM, SamplingParams
from crossdock.core import ConfigError, EngineConfig, UserError, parse_routing
from crossdock.launch.start import find_model, find_tokenizer
from crossdock.models.byte_tokenizer import ByteTokenizer
from crossdock.models.detokenizer import Detokenizer
from crossdock.models.dummy import DummyWeights

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def test_a_tensor_depends_on_its_name_alone():
    def make(seed=0):
        return DummyWeights(torch.float32, torch.device("cpu"), seed)

    a, b = make(), make()
    b.get("other.weight", (4, 4))
    first = a.get("x.weight", (64, 256))
    assert torch.equal(first, b.get("x.weight", (64, 256)))
    assert not torch.equal(first, a.get("y.weight", (64, 256)))
    assert not torch.equal(first, make(1).get("x.weight", (64, 256)))
    assert first.std().item() == pytest.approx(1 / 16, rel=0.1)
    assert (a.get("input_layernorm.weight", (8,)) == 1).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_a_config_alone(tiny, ranks):
    settings = {"load": "dummy", "layers": 2, "ranks": ranks, "kv_memory_gib": 0.02}
    with LLM(str(tiny), **settings) as llm:
        assert llm.client.spec.num_layers == 2
        outputs = llm.generate(["abc", "de"], GREEDY)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert outputs[0].prompt_token_ids == (97, 98, 99)
    assert all(len(ids) == 5 and max(ids) < 300 for ids in tokens)
    with LLM(str(tiny), **{**settings, "ranks": 1}) as alone:
        assert [o.outputs[0].token_ids for o in alone.generate(["abc", "de"], GREEDY)] == tokens


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.2"])
def test_drawn_routing_has_the_popularity_it_says(tiny, routing):
    with LLM(str(tiny), load="dummy", routing=routing, prefix_caching=False) as llm:
        llm.generate(["x" * 250] * 6, SamplingParams(max_tokens=1))
        loads = torch.tensor(llm.client.snapshots(60)[0].values["expert_tokens"]).sum(0).float()
    assert loads.sum() == 6 * 250 * 2 * 3
    share = loads / loads.sum()
    if routing == "uniform":
        assert (share - 1 / 8).abs().max() < 0.02
    else:
        assert share[0] > 2 * share[4] and (share[:-1] + 0.03 > share[1:]).all()


def test_shipped_configs_are_found_by_name():
    config = EngineConfig("qwen3-30b-a3b", load="dummy")
    path = find_model(config)
    assert path.name == "qwen3-30b-a3b.json"
    tokenizer = find_tokenizer(EngineConfig(str(path), load="dummy"))
    assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
    with pytest.raises(UserError, match=r'without weights.*load = "dummy"'):
        find_model(EngineConfig("DeepSeek-V3"))


def test_what_cannot_be_is_refused(tiny):
    for text in ("zipf", "zipf:-1", "zipf:x", "skewed", "zipf:nan"):
        with pytest.raises(ConfigError, match="expected real, uniform or zipf:A"):
            parse_routing(text)
    with pytest.raises(ConfigError, match="layers 9 is more than the model's 3"):
        LLM(str(tiny), load="dummy", layers=9)


def test_every_token_of_a_model_without_a_tokenizer_shows():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a\u00e9") == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169, 256, 102399]) == "a\u00e9\u25a1\u25a1"
    shown = Detokenizer(tokenizer)
    assert [shown.push([token]) for token in (256, 98, 5000)] == ["\u25a1", "b", "\u25a1"]
