"""Names of a target and a drafter, a prompt, a policy → loaded models, model inputs, one decoded request."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hybridspec_hf import DFlashDrafter, HybridSpecConfig
from hybridspec_hf.drafters.loading import check_folder

TINY_PAIR = Path(__file__).resolve().parent.parent / "assets" / "tiny_pair"

# the same call without a drafter
AUTOREGRESSIVE = "ar"
DTYPES = ["auto", "float32", "bfloat16"]


class Pair(NamedTuple):
    """A target with its tokenizer, and the drafter that was trained for it (None: autoregressive decoding only)."""

    tokenizer: Any
    model: Any
    drafter: DFlashDrafter | None


def load_pair(target: str, drafter: str | None, *, dtype: str, device_map: str) -> Pair:
    """Load a target and its drafter in one dtype onto the devices of `device_map`."""
    check_folder(target, "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map=device_map)
    loaded = drafter and DFlashDrafter.from_pretrained(drafter, dtype=dtype, device_map=device_map)
    return Pair(AutoTokenizer.from_pretrained(target), model, loaded or None)


def encode(pair: Pair, prompt: str, *, chat_template: bool) -> dict[str, Tensor]:
    """Tokenise one prompt.

    Returns:
        `input_ids` and `attention_mask`, `[1, T]`, on the target's device.

    Raises:
        ValueError: if a chat template is asked for and the tokenizer has none.
    """
    if not chat_template:
        return pair.tokenizer(prompt, return_tensors="pt").to(pair.model.device)
    if pair.tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {pair.model.config.name_or_path!r} has no chat template, so the prompt cannot be put "
            "into one. Pass --no-chat-template to continue the prompt as it is."
        )
    return pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(pair.model.device)


def run_plain(pair: Pair, inputs: dict[str, Tensor], *, max_new_tokens: int) -> Tensor:
    """What transformers itself generates greedily: `[1, T + new]` token ids, the yardstick of every policy."""
    return pair.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)


def run_policy(
    pair: Pair,
    inputs: dict[str, Tensor],
    policy: str,
    *,
    max_new_tokens: int,
    stream: bool,
    config: HybridSpecConfig | None = None,
) -> Any:
    """Decode one request with HybridSpec.

    Args:
        inputs: what `encode` returned.
        policy: a policy of `HybridSpecConfig`, or "ar".
        stream: print the text as it is emitted.
        config: calibrated tables and other options; the policy is put into it.

    Returns:
        The output of generate, with `sequences` `[1, T + new]` and `report`.
    """
    options: dict[str, Any] = {}
    if policy != AUTOREGRESSIVE:
        config = replace(config or HybridSpecConfig(), policy=policy)
        options = {"assistant_model": pair.drafter, "hybridspec_config": config}
    streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    return pair.model.generate(
        **inputs,
        generation_mode="hybridspec",
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        streamer=streamer,
        **options,
    )


def policy_name(text: str) -> str:
    """A policy given on the command line, checked by argparse before any model is loaded."""
    if text != AUTOREGRESSIVE:
        try:
            HybridSpecConfig(policy=text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


def positive(text: str) -> int:
    """A whole number from 1 given on the command line, checked by argparse before any model is loaded."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def pick_device(name: str) -> str:
    """`auto` is the first GPU if there is one.

    Raises:
        ValueError: for a GPU that torch cannot use.
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this torch sees no GPU. Use --device cpu, or install torch with CUDA.")
    if name != "auto":
        return name
    return "cuda:0" if torch.cuda.is_available() else "cpu"
