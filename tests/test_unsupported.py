"""What is not built raises before a token is generated, names the argument, and leaves plain generate working."""

import pytest
import torch
from support.streamers import CountingStreamer
from support.tiny_models import tiny_drafter, tiny_target
from transformers import DynamicCache, GenerationConfig, GPT2Config, GPT2LMHeadModel

from hybridspec_hf import DFlashDrafter, HybridSpecConfig
from hybridspec_hf.validation import ASSISTANT_OPTIONS


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(model):
    return tiny_drafter(model)


IDS = torch.tensor([[5, 6, 7, 8]])
MODE = {"generation_mode": "hybridspec", "do_sample": False, "max_new_tokens": 6}
CASES = {
    "num_beams": ({**MODE, "num_beams": 2}, "num_beams"),
    "beam_sample": ({**MODE, "num_beams": 2, "do_sample": True}, "num_beams"),
    "prompt_lookup": ({**MODE, "prompt_lookup_num_tokens": 3}, "prompt_lookup"),
    "unknown_mode": ({**MODE, "generation_mode": "speculative"}, "Unknown generation_mode 'speculative'"),
    "config_without_mode": ({"hybridspec_config": HybridSpecConfig(), "max_new_tokens": 4}, "generation_mode"),
    "sampling": ({**MODE, "do_sample": True}, "do_sample=False"),
    "num_return_sequences": ({**MODE, "num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    "batch": ({**MODE, "input_ids": IDS.repeat(3, 1)}, "batch size 3"),
    "repetition_penalty": ({**MODE, "repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
    "min_new_tokens": ({**MODE, "min_new_tokens": 3, "eos_token_id": 1}, "min_new_tokens"),
    "bad_words": ({**MODE, "bad_words_ids": [[3]]}, "bad_words_ids"),
    "output_scores": ({**MODE, "output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "output_logits": ({**MODE, "output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "output_hidden": ({**MODE, "output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "output_attentions": ({**MODE, "output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no_cache": ({**MODE, "use_cache": False}, "use_cache"),
    "offloaded_cache": ({**MODE, "cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "padding": ({**MODE, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask"),
    "assistant_tokenizer": ({**MODE, "tokenizer": object(), "assistant_tokenizer": object()}, "assistant_tokenizer"),
    "synced_gpus": ({**MODE, "synced_gpus": True}, "synced_gpus"),
    "policy": ({**MODE, "hybridspec_config": {"policy": "fastest"}}, "Unknown policy 'fastest'"),
    "policy_length": ({**MODE, "hybridspec_config": {"policy": "static:1"}}, "static:1"),
    "policy_too_long": ({**MODE, "hybridspec_config": {"policy": "static:17"}}, "17 tokens"),
    "config_key": ({**MODE, "hybridspec_config": {"police": "full"}}, "police"),
    "assistant_tokens": ({**MODE, "num_assistant_tokens": 3}, "num_assistant_tokens"),
    "assistant_threshold": ({**MODE, "assistant_confidence_threshold": 0.9}, "assistant_confidence_threshold"),
    "assistant_schedule": ({**MODE, "num_assistant_tokens_schedule": "heuristic"}, "num_assistant_tokens_schedule"),
    "assistant_lookbehind": ({**MODE, "assistant_lookbehind": 3}, "assistant_lookbehind"),
    "target_lookbehind": ({**MODE, "target_lookbehind": 3}, "target_lookbehind"),
    "config_type": ({**MODE, "hybridspec_config": "full"}, "HybridSpecConfig"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_unsupported_calls_raise_and_plain_generate_still_works(model, drafter, name):
    kwargs, message = CASES[name]
    kwargs = {"input_ids": IDS, **kwargs}
    plain = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False)
    if kwargs.get("generation_mode"):
        kwargs["assistant_model"] = drafter
    with pytest.raises(ValueError) as error:
        model.generate(**kwargs)
    assert message in str(error.value)
    assert torch.equal(model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False), plain)


def test_contrastive_search_is_refused(model, drafter):
    with pytest.raises(ValueError, match="contrastive"):
        model.generate(input_ids=IDS, assistant_model=drafter, penalty_alpha=0.6, top_k=4, **MODE)


def test_a_given_cache_is_refused(model, drafter):
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="past_key_values"):
        model.generate(input_ids=IDS, assistant_model=drafter, cache=cache, **MODE)


def test_assistant_that_is_no_dflash_drafter(model):
    other = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=8, n_layer=1, n_head=1))
    for assistant in (other, model):
        with pytest.raises(ValueError, match="must be a hybridspec_hf.DFlashDrafter"):
            model.generate(input_ids=IDS, assistant_model=assistant, **MODE)


def test_unsupported_target(drafter):
    other = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        other.generate(input_ids=IDS, pad_token_id=0, **MODE)


@pytest.mark.parametrize("changes, numbers", [
    ({"hidden_size": 48, "head_dim": 12}, ("48", "32")),
    ({"vocab_size": 120}, ("120", "97")),
    ({"target_layer_ids": [0, 4]}, ("4",)),
])  # fmt: skip
def test_wrong_drafter(model, changes, numbers):
    wrong = tiny_drafter(model, **changes)
    with pytest.raises(ValueError) as error:
        model.generate(input_ids=IDS, assistant_model=wrong, **MODE)
    assert all(number in str(error.value) for number in numbers), str(error.value)


def test_drafter_in_half_precision_is_refused(model, drafter):
    with pytest.raises(ValueError, match="float16"):
        half = DFlashDrafter(drafter.config).to(torch.float16)
        model.generate(input_ids=IDS, assistant_model=half, **MODE)


@pytest.mark.parametrize("defaults", [{}, ASSISTANT_OPTIONS])
def test_default_options_of_assisted_generation_are_no_request(model, drafter, defaults):
    plain = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False)
    config = GenerationConfig(**MODE, **defaults)
    assert torch.equal(model.generate(input_ids=IDS, generation_config=config, assistant_model=drafter), plain)
    assert torch.equal(model.generate(input_ids=IDS, assistant_model=drafter, **MODE, **defaults), plain)
    assert set(ASSISTANT_OPTIONS) == {name for name in vars(config) if "num_assistant" in name} | {
        "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"
    }  # fmt: skip


EXPERTS = {"mean_new_pairs": [1.0] * 17, "mean_new_pairs_given": [[1.0] * 6] * 17, "num_moe_layers": 4, "top_k": 5}
COST = {"target_cost": [1.0] * 9, "fixed_cost": 1.0, "stage0_token_cost": 0.1, "expert_cost": 0.1}


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.3},
    {"hybridspec_config": {"experts": EXPERTS}},
    {"hybridspec_config": {"cost": COST}},
    {"hybridspec_config": {"policy": "nominal", "cost": {**COST, "fixed_cost": None}}},
])  # fmt: skip
def test_errors_come_before_any_token(model, drafter, options):
    streamer = CountingStreamer()
    with pytest.raises(ValueError):
        model.generate(input_ids=IDS, assistant_model=drafter, streamer=streamer, **MODE, **options)
    # transformers hands the prompt to the streamer before any decoding method runs
    assert streamer.puts == 1


def test_split_over_devices_is_refused(drafter):
    model = tiny_target()
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="one device"):
        model.generate(input_ids=IDS, generation_mode="hybridspec", max_new_tokens=3, do_sample=False)


def test_a_cache_that_does_not_fit_says_what_to_lower(model, drafter):
    with pytest.raises(RuntimeError, match="max_new_tokens"):
        model.generate(input_ids=IDS, assistant_model=drafter, **{**MODE, "max_new_tokens": 10**12})


def test_a_drafter_without_the_mode_is_pointed_to_it(model, drafter):
    with pytest.raises(ValueError, match='generation_mode="hybridspec"'):
        model.generate(input_ids=IDS, assistant_model=drafter, do_sample=False, max_new_tokens=4)
