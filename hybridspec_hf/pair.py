"""Names of a target and a drafter, a prompt, a policy → loaded models, model inputs, one decoded request."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from hybridspec_generation import HybridSpecConfig

from .drafters.dflash import DFlashDrafter
from .drafters.loading import check_folder

TINY_PAIR = Path(__file__).resolve().parent / "assets" / "tiny_pair"

# the same call without a drafter
AUTOREGRESSIVE = "ar"


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


def read_prompts(path: Path, count: int) -> list[dict[str, str]]:
    """`count` prompts of a file with one JSON object (`category`, `prompt`) a line, the categories taking turns."""
    if count < 1:
        raise ValueError(f"--prompts must be at least 1, got {count}.")
    seen: Counter[str] = Counter()
    turns: list[tuple[int, dict[str, str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns.append((seen[row["category"]], row))
        seen[row["category"]] += 1
    return [row for _, row in sorted(turns, key=lambda turn: turn[0])][:count]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep weight-loading bars and advice on faster kernels away."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
