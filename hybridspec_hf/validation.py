"""What generate was asked for -> errors before any token is generated: got, why not, what to do."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from hybridspec_generation import HybridSpecConfig

from .drafters.compatibility import check_compatible
from .drafters.dflash import DFlashDrafter

# of transformers' assisted generation, with the defaults that generate fills in
ASSISTANT_OPTIONS = {
    name: default
    for name, default in GenerationConfig._get_default_generation_params().items()
    if "assistant" in name or name == "target_lookbehind"
}
RETURNED_TENSORS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
SUPPORTED_CACHES = (None, "dynamic", "dynamic_full", "static")


def as_config(value: Any) -> HybridSpecConfig:
    """The `hybridspec_config` option as a config: an object, its dict (as JSON gives it), or None for the default.

    Raises:
        ValueError: for another type or an invalid content.
    """
    if value is None:
        return HybridSpecConfig()
    if isinstance(value, HybridSpecConfig):
        return value
    if isinstance(value, dict):
        return HybridSpecConfig.from_dict(value)
    raise ValueError(
        f"hybridspec_config must be a HybridSpecConfig or its dict, got {type(value).__name__}. "
        'For example hybridspec_config=HybridSpecConfig(policy="full").'
    )


def check_drafter(assistant_model: Any, model: Any, assistant_tokenizer: Any = None) -> DFlashDrafter | None:
    """The drafter, or None for autoregressive decoding.

    Raises:
        ValueError: if it is no DFlash drafter, does not fit the target, lives on another device, or comes with a
            tokenizer of its own.
    """
    if assistant_tokenizer is not None:
        raise ValueError("A DFlash drafter reads the target's tokens: leave assistant_tokenizer out.")
    if assistant_model is None:
        return None
    if not isinstance(assistant_model, DFlashDrafter):
        raise ValueError(
            f"assistant_model must be a hybridspec_hf.DFlashDrafter, got {type(assistant_model).__name__}, which "
            "proposes no blocks. Load one with DFlashDrafter.from_pretrained(...), or leave assistant_model out to "
            "decode autoregressively."
        )
    check_compatible(assistant_model, model.config.get_text_config())
    if assistant_model.device != model.device:
        raise ValueError(
            f"The drafter is on {assistant_model.device}, the target on {model.device}. "
            f'Load the drafter with device_map={{"": "{model.device}"}}.'
        )
    return assistant_model


def check_options(
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
) -> None:
    """Refuse what is not built yet.

    Raises:
        ValueError: naming the argument.
    """
    if torch.is_autocast_enabled(input_ids.device.type):
        raise ValueError(
            "HybridSpec computes in the model's own dtype, but torch.autocast is on. Leave the autocast block, and "
            "load the model in the dtype you want."
        )
    if synced_gpus:
        raise ValueError("synced_gpus (ZeRO-3 / FSDP) is not supported by HybridSpec: leave it out.")
    batch = max(input_ids.shape[0], _rows(model_kwargs.get("inputs_embeds")))
    if batch != 1:
        copies = generation_config.num_return_sequences
        why = f" (num_return_sequences={copies})" if copies and copies > 1 else ""
        raise ValueError(
            f"HybridSpec decodes one sequence at a time, got batch size {batch}{why}. "
            "Call generate once per prompt, or drop generation_mode."
        )
    if generation_config.do_sample:
        raise ValueError(
            "HybridSpec decodes greedily, got do_sample=True (perhaps from the model's generation_config). "
            "Pass do_sample=False, or drop generation_mode to sample with plain generate."
        )
    if len(logits_processor):
        names = [type(processor).__name__ for processor in logits_processor]
        raise ValueError(
            f"HybridSpec does not apply logits processors yet, got {names}. Remove the options that create them "
            "(repetition_penalty, no_repeat_ngram_size, min_new_tokens, bad_words_ids, ...), or drop generation_mode."
        )
    for option in RETURNED_TENSORS:
        if generation_config.return_dict_in_generate and getattr(generation_config, option, None):
            raise ValueError(f"HybridSpec does not return per-token tensors: set {option}=False.")
    _check_assistant_options(generation_config)
    _check_cache(generation_config, model_kwargs)
    _check_mask(model_kwargs.get("attention_mask"))


def _check_assistant_options(generation_config: GenerationConfig) -> None:
    for option, default in ASSISTANT_OPTIONS.items():
        if getattr(generation_config, option, None) not in (None, default):
            raise ValueError(
                f"{option} steers transformers' assisted generation and has no effect on HybridSpec, whose policy "
                'chooses the lengths. Remove it; see hybridspec_config=HybridSpecConfig(policy="static:N").'
            )


def _rows(inputs_embeds: Tensor | None) -> int:
    return 0 if inputs_embeds is None else inputs_embeds.shape[0]


def _check_cache(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    cache = model_kwargs.get("cache")
    if not generation_config.use_cache or cache is None:
        raise ValueError("HybridSpec needs the cache: use_cache=False is not supported. Leave use_cache out.")
    if generation_config.cache_implementation not in SUPPORTED_CACHES:
        raise ValueError(
            f"HybridSpec keeps its own static cache; cache_implementation={generation_config.cache_implementation!r} "
            "is not supported. Leave it out."
        )
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0:
        raise ValueError(
            "HybridSpec builds its own cache and cannot continue from a given one (cache / past_key_values). "
            "Leave it out and pass the whole prompt."
        )


def _check_mask(attention_mask: Tensor | None) -> None:
    # generate drops an all-ones mask, so one that is left hides tokens
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise ValueError(
            "HybridSpec takes prompts without padding, but attention_mask hides some tokens. "
            "Pass the unpadded prompt: input_ids[:, attention_mask[0].bool()]."
        )
