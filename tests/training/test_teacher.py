"""The teacher's decoder against transformers' generate."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridspec_hf.training.teacher import LlamaDecoder


def test_greedy_decoding_matches_generate_with_left_padding():
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 60, (3, 9))
    real = torch.ones(3, 9, dtype=torch.bool)
    real[1, :4] = False
    real[2, :7] = False
    expected = model.generate(ids, attention_mask=real.long(), max_new_tokens=14, do_sample=False)[:, 9:]
    found = LlamaDecoder(model, temperature=0).generate(ids, real, 14, eos=-1)
    assert found.tolist() == expected.tolist()
