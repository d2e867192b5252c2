"""A small random checkpoint with everything the commands need of one."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = DeepseekV3Config(
        vocab_size=len(alphabet), hidden_size=32, num_hidden_layers=2, first_k_dense_replace=1,
        intermediate_size=48, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, n_group=2,
        topk_group=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.save_pretrained(path)
    return path
